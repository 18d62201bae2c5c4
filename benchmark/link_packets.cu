// How fast can kernels move data between two GPUs, whatever they are written in?
//
//     nvcc -std=c++17 -gencode=arch=compute_90a,code=sm_90a -o link_packets benchmark/link_packets.cu && ./link_packets
//
// Moves 256 MiB between GPU 0 and GPU 1 by the copy engine, by 16-byte loads and stores, and by one-dimensional bulk
// TMA copies; in a ring (both GPUs at once) and in one direction. Then prints the links' raw and payload counters around
// 4 GiB of each way. docs/performance.md says what came out: a packet carries 128 bytes for an SM, 256 for the copy engine.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <cuda_runtime.h>

constexpr size_t kBytes = size_t{256} << 20;
constexpr int kCopies = 4;  // between two time stamps, so that launches do not count

#define CHECK(call)                                                                  \
    do {                                                                             \
        cudaError_t status = (call);                                                 \
        if (status != cudaSuccess) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(status)); \
            exit(1);                                                                 \
        }                                                                            \
    } while (0)

// Each warp moves kUnroll * 512 contiguous bytes per step.
template <int kUnroll>
__global__ void vector_copy(uint4* target, const uint4* source, size_t count) {
    const size_t warps = size_t{gridDim.x} * (blockDim.x / 32);
    const size_t warp = size_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    for (size_t begin = warp * 32 * kUnroll; begin < count; begin += warps * 32 * kUnroll) {
        uint4 values[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) values[i] = source[begin + i * 32 + lane];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) target[begin + i * 32 + lane] = values[i];
    }
}

// One thread of each block drives bulk copies of kChunk bytes through kStages buffers of shared memory.
template <int kChunk, int kStages>
__global__ void bulk_copy(char* target, const char* source, size_t bytes) {
    extern __shared__ __align__(128) char buffers[];
    __shared__ __align__(8) uint64_t barriers[kStages];
    if (threadIdx.x != 0) return;
    const uint32_t first_barrier = static_cast<uint32_t>(__cvta_generic_to_shared(barriers));
    const uint32_t first_buffer = static_cast<uint32_t>(__cvta_generic_to_shared(buffers));
    for (int i = 0; i < kStages; ++i)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(first_barrier + 8 * i));
    asm volatile("fence.mbarrier_init.release.cluster;");
    const size_t chunks = bytes / kChunk;
    auto load = [&](size_t turn) {
        const size_t chunk = blockIdx.x + turn * gridDim.x;
        if (chunk >= chunks) return;
        const uint32_t barrier = first_barrier + 8 * (turn % kStages);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(kChunk) : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                first_buffer + static_cast<uint32_t>(turn % kStages) * kChunk),
            "l"(source + chunk * kChunk), "r"(kChunk), "r"(barrier)
            : "memory");
    };
    size_t ahead = 0;
    for (; ahead < kStages - 1; ++ahead) load(ahead);
    for (size_t turn = 0; blockIdx.x + turn * gridDim.x < chunks; ++turn) {
        const int stage = turn % kStages;
        const uint32_t parity = (turn / kStages) & 1;
        uint32_t arrived = 0;
        while (!arrived)
            asm volatile(
                "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                : "=r"(arrived)
                : "r"(first_barrier + 8 * stage), "r"(parity)
                : "memory");
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                         target + (blockIdx.x + turn * gridDim.x) * kChunk),
                     "r"(first_buffer + stage * kChunk), "r"(kChunk)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;");
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        load(ahead++);
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

char *sources[2], *targets[2];
cudaStream_t streams[2];
using Move = std::function<void(int gpu, char* target, const char* source)>;

void measure(const std::string& name, const Move& move) {
    for (bool ring : {true, false})
        for (bool put : {true, false}) {
            const int gpus = ring ? 2 : 1;
            std::vector<float> times;
            for (int repeat = 0; repeat < 7; ++repeat) {
                cudaEvent_t begin[2], end[2];
                for (int gpu = 0; gpu < gpus; ++gpu) {
                    CHECK(cudaSetDevice(gpu));
                    CHECK(cudaDeviceSynchronize());
                    CHECK(cudaEventCreate(&begin[gpu]));
                    CHECK(cudaEventCreate(&end[gpu]));
                }
                for (int gpu = 0; gpu < gpus; ++gpu) {
                    CHECK(cudaSetDevice(gpu));
                    CHECK(cudaEventRecord(begin[gpu], streams[gpu]));
                    for (int i = 0; i < kCopies; ++i)
                        move(gpu, put ? targets[1 - gpu] : targets[gpu], put ? sources[gpu] : sources[1 - gpu]);
                    CHECK(cudaEventRecord(end[gpu], streams[gpu]));
                }
                float slowest = 0, time = 0;
                for (int gpu = 0; gpu < gpus; ++gpu) {
                    CHECK(cudaStreamSynchronize(streams[gpu]));
                    CHECK(cudaEventElapsedTime(&time, begin[gpu], end[gpu]));
                    slowest = std::max(slowest, time);
                }
                CHECK(cudaGetLastError());
                times.push_back(slowest);
            }
            std::sort(times.begin(), times.end());
            const double rate = kCopies * kBytes / times[times.size() / 2] / 1e6;
            printf("%-28s %-8s %s %6.1f GB/s\n", name.c_str(), ring ? "ring" : "one way", put ? "put" : "get", rate);
        }
}

template <int kChunk, int kStages>
Move bulk(int blocks) {
    for (int gpu = 0; gpu < 2; ++gpu) {
        CHECK(cudaSetDevice(gpu));
        CHECK(cudaFuncSetAttribute(bulk_copy<kChunk, kStages>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kChunk * kStages));
    }
    return [blocks](int gpu, char* target, const char* source) {
        bulk_copy<kChunk, kStages><<<blocks, 32, kChunk * kStages, streams[gpu]>>>(target, source, kBytes);
    };
}

void counters(const std::string& name, const Move& move, bool put) {
    CHECK(cudaSetDevice(0));
    for (const char* when : {"before", "after"}) {
        printf("-- %s %s %s\n", when, name.c_str(), put ? "put" : "get");
        fflush(stdout);
        if (system("nvidia-smi nvlink -gt r -i 0 | sed -n 2,3p; nvidia-smi nvlink -gt d -i 0 | sed -n 2,3p")) exit(1);
        if (std::string(when) == "after") break;
        for (int i = 0; i < 16; ++i) move(0, put ? targets[1] : targets[0], put ? sources[0] : sources[1]);
        CHECK(cudaDeviceSynchronize());
    }
}

int main() {
    for (int gpu = 0; gpu < 2; ++gpu) {
        CHECK(cudaSetDevice(gpu));
        CHECK(cudaDeviceEnablePeerAccess(1 - gpu, 0));
        CHECK(cudaMalloc(&sources[gpu], kBytes));
        CHECK(cudaMalloc(&targets[gpu], kBytes));
        CHECK(cudaStreamCreate(&streams[gpu]));
        std::vector<uint32_t> data(kBytes / 4);
        uint32_t state = gpu + 1;
        for (auto& word : data) word = state = state * 1664525u + 1013904223u;
        CHECK(cudaMemcpy(sources[gpu], data.data(), kBytes, cudaMemcpyHostToDevice));
    }
    const Move engine = [](int gpu, char* target, const char* source) {
        CHECK(cudaMemcpyAsync(target, source, kBytes, cudaMemcpyDefault, streams[gpu]));
    };
    const Move vector = [](int gpu, char* target, const char* source) {
        vector_copy<8><<<132, 512, 0, streams[gpu]>>>(reinterpret_cast<uint4*>(target),
                                                      reinterpret_cast<const uint4*>(source), kBytes / 16);
    };
    measure("copy engine", engine);
    measure("16-byte loads and stores", vector);
    measure("bulk TMA, 8 x 4 KiB", bulk<4096, 8>(132));
    measure("bulk TMA, 8 x 16 KiB", bulk<16384, 8>(132));
    measure("bulk TMA, 6 x 32 KiB", bulk<32768, 6>(132));
    for (bool put : {true, false}) {
        counters("copy engine", engine, put);
        counters("16-byte loads and stores", vector, put);
    }
}
