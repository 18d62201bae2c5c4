#include <cstdio>
#include <vector>
#include <string>
#include <cstdlib>
#include <algorithm>
#include <cuda_runtime.h>
#include <cstdint>
#define CK(x) do{cudaError_t e=(x); if(e!=cudaSuccess){printf("ERR %s line %d\n",cudaGetErrorString(e),__LINE__);exit(1);}}while(0)
// variants of load / store
template<int V> __device__ __forceinline__ uint4 ld(const uint4* p){ uint4 r;
 if(V==0) asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];":"=r"(r.x),"=r"(r.y),"=r"(r.z),"=r"(r.w):"l"(p));
 if(V==1) asm volatile("ld.global.L2::256B.v4.u32 {%0,%1,%2,%3},[%4];":"=r"(r.x),"=r"(r.y),"=r"(r.z),"=r"(r.w):"l"(p));
 if(V==2) asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3},[%4];":"=r"(r.x),"=r"(r.y),"=r"(r.z),"=r"(r.w):"l"(p));
 if(V==3) asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3},[%4];":"=r"(r.x),"=r"(r.y),"=r"(r.z),"=r"(r.w):"l"(p));
 return r;}
template<int V> __device__ __forceinline__ void st(uint4* p, uint4 r){
 if(V==0) asm volatile("st.global.v4.u32 [%4],{%0,%1,%2,%3};"::"r"(r.x),"r"(r.y),"r"(r.z),"r"(r.w),"l"(p));
 if(V==1) asm volatile("st.global.L1::no_allocate.v4.u32 [%4],{%0,%1,%2,%3};"::"r"(r.x),"r"(r.y),"r"(r.z),"r"(r.w),"l"(p));
 if(V==2) asm volatile("st.relaxed.sys.global.v4.u32 [%4],{%0,%1,%2,%3};"::"r"(r.x),"r"(r.y),"r"(r.z),"r"(r.w),"l"(p));
 if(V==3) asm volatile("st.global.wt.v4.u32 [%4],{%0,%1,%2,%3};"::"r"(r.x),"r"(r.y),"r"(r.z),"r"(r.w),"l"(p));
}
// per-warp contiguous U*512 bytes
template<int L,int S,int U,bool WARPC> __global__ void copyk(uint4* d,const uint4* s,size_t n){
  int lane=threadIdx.x%32; size_t nw=(size_t)gridDim.x*(blockDim.x/32);
  size_t w=(size_t)blockIdx.x*(blockDim.x/32)+threadIdx.x/32;
  if(WARPC){ for(size_t b=w*32*U;b<n;b+=nw*32*U){ uint4 r[U];
    #pragma unroll
    for(int u=0;u<U;u++) r[u]=ld<L>(s+b+u*32+lane);
    #pragma unroll
    for(int u=0;u<U;u++) st<S>(d+b+u*32+lane,r[u]); } }
  else { size_t T=(size_t)blockDim.x; for(size_t b=(size_t)blockIdx.x*T*U;b<n;b+=gridDim.x*T*U){ uint4 r[U];
    #pragma unroll
    for(int u=0;u<U;u++) r[u]=ld<L>(s+b+u*T+threadIdx.x);
    #pragma unroll
    for(int u=0;u<U;u++) st<S>(d+b+u*T+threadIdx.x,r[u]); } }
}
// bulk 1d TMA, STG stages of CH bytes, one thread drives
template<int CH,int STG> __global__ void bulkk(char* d,const char* s,size_t n){
  extern __shared__ __align__(128) char sm[]; __shared__ __align__(8) uint64_t bar[STG];
  if(threadIdx.x) return;
  uint32_t b0=(uint32_t)__cvta_generic_to_shared(bar), s0=(uint32_t)__cvta_generic_to_shared(sm);
  for(int i=0;i<STG;i++) asm volatile("mbarrier.init.shared::cta.b64 [%0],1;"::"r"(b0+8*i));
  asm volatile("fence.mbarrier_init.release.cluster;");
  size_t chunks=n/CH; size_t it=0; size_t issued=0; size_t first=blockIdx.x;
  auto load=[&](size_t k){ size_t c=first+k*gridDim.x; if(c>=chunks) return; int q=k%STG;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;"::"r"(b0+8*q),"r"(CH):"memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"::"r"(s0+q*CH),"l"(s+c*CH),"r"(CH),"r"(b0+8*q):"memory"); };
  for(;issued<STG-1;issued++) load(issued);
  for(;;it++){ size_t c=first+it*gridDim.x; if(c>=chunks) break; int q=it%STG; uint32_t ph=(it/STG)&1; uint32_t ok=0;
    while(!ok) asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2; selp.u32 %0,1,0,p;}":"=r"(ok):"r"(b0+8*q),"r"(ph):"memory");
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;"::"l"(d+c*CH),"r"(s0+q*CH),"r"(CH):"memory");
    asm volatile("cp.async.bulk.commit_group;");
    asm volatile("cp.async.bulk.wait_group.read 1;":::"memory");
    load(issued); issued++; }
  asm volatile("cp.async.bulk.wait_group 0;":::"memory");
}
char *A[2],*B[2]; cudaStream_t st_[2]; size_t NB=256u<<20;
template<class F> void bench(const char* name,F f,bool both){
  for(int put=1;put>=0;put--){ std::vector<float> ts;
   for(int it=0;it<6;it++){ cudaEvent_t a[2],b[2];
    for(int g=0;g<(both?2:1);g++){ CK(cudaSetDevice(g)); CK(cudaDeviceSynchronize()); CK(cudaEventCreate(&a[g])); CK(cudaEventCreate(&b[g])); }
    for(int g=0;g<(both?2:1);g++){ CK(cudaSetDevice(g)); cudaEventRecord(a[g],st_[g]); for(int rep=0;rep<4;rep++) f(g, put?B[1-g]:B[g], put?A[g]:A[1-g]); cudaEventRecord(b[g],st_[g]); }
    float worst=0; for(int g=0;g<(both?2:1);g++){ CK(cudaSetDevice(g)); CK(cudaStreamSynchronize(st_[g])); float t; cudaEventElapsedTime(&t,a[g],b[g]); worst=std::max(worst,t);} CK(cudaGetLastError());
    ts.push_back(worst);} std::sort(ts.begin(),ts.end());
   printf("%-40s %s %s %.1f\n",name,both?"ring":"one ",put?"put":"get",4.0*NB/ts[ts.size()/2]/1e6);} fflush(stdout);}
void nv(const char* w){ printf("-- %s\n",w); fflush(stdout); system("nvidia-smi nvlink -gt r -i 0 2>&1 | head -4; nvidia-smi nvlink -gt d -i 0 2>&1 | head -4"); }
int main(){
  for(int g=0;g<2;g++){ CK(cudaSetDevice(g)); CK(cudaDeviceEnablePeerAccess(1-g,0)); CK(cudaMalloc(&A[g],NB)); CK(cudaMalloc(&B[g],NB)); CK(cudaStreamCreate(&st_[g])); 
    std::vector<uint32_t> h(NB/4); uint32_t x=g+1; for(auto&v:h){x=x*1664525u+1013904223u; v=x;} CK(cudaMemcpy(A[g],h.data(),NB,cudaMemcpyHostToDevice)); }
  nv("start");
  for(int both=1;both>=0;both--){
  bench("ce",[&](int g,char*d,char*s){ cudaMemcpyAsync(d,s,NB,cudaMemcpyDefault,st_[g]); },both);
#define K(L,S,U,W,G,T) bench("ld" #L " st" #S " u" #U " warpc" #W " grid" #G " thr" #T,[&](int g,char*d,char*s){ copyk<L,S,U,W><<<G,T,0,st_[g]>>>((uint4*)d,(uint4*)s,NB/16); },both);
  K(0,0,4,false,132,512) K(0,0,8,true,132,512) K(0,0,8,true,264,256) K(1,0,8,true,132,512)  K(0,0,8,true,32,512)
#define BK(CH,STG,G) CK(cudaSetDevice(0)); cudaFuncSetAttribute(bulkk<CH,STG>,cudaFuncAttributeMaxDynamicSharedMemorySize,CH*STG); CK(cudaSetDevice(1)); cudaFuncSetAttribute(bulkk<CH,STG>,cudaFuncAttributeMaxDynamicSharedMemorySize,CH*STG); bench("bulk ch" #CH " stages" #STG " grid" #G,[&](int g,char*d,char*s){ bulkk<CH,STG><<<G,32,CH*STG,st_[g]>>>(d,s,NB); },both);
  BK(2048,8,132) BK(4096,8,132) BK(8192,8,132) BK(16384,8,132) BK(32768,6,132) BK(16384,8,64) BK(16384,8,32) BK(16384,8,16) BK(32768,6,24) BK(1024,16,132)
  }
  nv("end");
  // raw counters per method
  auto cnt=[&](const char*n,auto f){ nv((std::string("before ")+n).c_str()); for(int i=0;i<16;i++) f(); CK(cudaDeviceSynchronize()); nv((std::string("after ")+n).c_str()); };
  CK(cudaSetDevice(0));
  cnt("ce put 4GB",[&]{cudaMemcpyAsync(B[1],A[0],NB,cudaMemcpyDefault,st_[0]);});
  cnt("sm put 4GB",[&]{copyk<0,0,8,true><<<132,512,0,st_[0]>>>((uint4*)B[1],(uint4*)A[0],NB/16);});
  cnt("ce get 4GB",[&]{cudaMemcpyAsync(B[0],A[1],NB,cudaMemcpyDefault,st_[0]);});
  cnt("sm get 4GB",[&]{copyk<0,0,8,true><<<132,512,0,st_[0]>>>((uint4*)B[0],(uint4*)A[1],NB/16);});
}
