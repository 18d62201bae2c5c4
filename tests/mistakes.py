"""Calls of device functions with wrong arguments, and the part of each error that tells the caller what is wrong."""

import triton
import triton.language as tl

import iris
from iris.device.words import store_words, take_words

FIRST_A_FLAG = "expected a pointer to a flag: the first argument"
FIRST_A_POINTER = "expected a pointer: the first argument; in iris.peer's functions the second, after the handle"
NO_HANDLE = "expected ctx.handle: the first argument of iris.peer's functions, the last of iris.signal"
NO_RANKS = "expected whole numbers as ranks"
NO_MEMBERS = "expected a pointer to int32 ranks, and their number"
NO_BASES = "heap_bases: expected ctx.heap_bases"
NO_VALUE = "value: expected numbers; what a pointer points to, iris.put copies"
NO_POINTERS = "expected two pointers: the first arguments; in iris.peer's functions those after the handle"
NO_EPOCH = "value: expected whole numbers, as flags are int32"
MISTAKES = {
    "signal, handle first": FIRST_A_FLAG,
    "wait, handle first": FIRST_A_FLAG,
    "wait, value first": FIRST_A_FLAG,
    "reached, handle first": FIRST_A_FLAG,
    "barrier, bases": NO_HANDLE,
    "peer, handle last": NO_HANDLE,
    "load, handle for bases": NO_BASES,
    "store, bases first": NO_BASES,
    "store, data for bases": NO_BASES,
    "hinted store, data for bases": NO_BASES,
    "atomic, handle first": FIRST_A_POINTER,
    "and of floats": "bitwise atomics are of integers",
    "xor of floats": "bitwise atomics are of integers",
    "cas of 1.5": "atomic_cas of integers: expected whole numbers",
    "cas of a float": "atomic_cas of integers: expected whole numbers",
    "signal of 1.5": NO_EPOCH,
    "signal_add of a float": NO_EPOCH,
    "wait for a float": NO_EPOCH,
    "wait_all for floats": NO_EPOCH,
    "wait, handle before peer": NO_RANKS,
    "wait, flag for peer": NO_RANKS,
    "signal, data for peer": NO_RANKS,
    "signal_all, handle before valid": NO_RANKS,
    "signal_all, no handle": NO_HANDLE,
    "load, data for rank": NO_RANKS,
    "store, mask for peer": NO_RANKS,
    "load, True for rank": NO_RANKS,
    "words of floats": "words are int32, or int64 for data that is not floats",
    "floats as words": "data: expected int32; of other dtypes its bits",
    "words taken of a row": "words are taken in blocks of three dimensions",
    "words taken of floats": "words are int32, or int64 for data that is not floats",
    "words of one peer": "peers: expected a block with a rank for each peer of the words",
    "words, no handle": NO_HANDLE,
    "copy, data for rank": NO_RANKS,
    "barrier_among, handle first": NO_MEMBERS,
    "barrier_among, handle second": NO_MEMBERS,
    "barrier_among, bases last": NO_HANDLE,
    "wait for a block": "wait() takes one flag: for a block of them there is wait_all()",
    "wait of a site of ones own": "site: expected a key of iris.device.control.SITES",
    "store of a pointer": NO_VALUE,
    "store of a handle": NO_VALUE,
    "add of a pointer": NO_VALUE,
    "sub of a pointer": NO_VALUE,
    "sub, handle first": FIRST_A_POINTER,
    "put of a value": NO_POINTERS,
    "get to a number": NO_POINTERS,
    "store, block of data for bases": NO_BASES,
    "store with a modifier of loads": "cache modifier of a store: expected one of '', .wb, .cg, .cs, .wt, got .ca",
    "get with both modifiers swapped": "cache modifier of a load: expected one of '', .ca, .cg, .cv, got .wt",
}


@triton.jit
def mistaken_kernel(flag, data, handle, KIND: tl.constexpr):
    if KIND == "signal, handle first":
        iris.signal(handle, flag, 1, 0)
    elif KIND == "wait, handle first":
        iris.wait(handle, flag, 1, 0)
    elif KIND == "wait, value first":
        iris.wait(1, flag, 0, handle)
    elif KIND == "reached, handle first":
        tl.store(data, iris.reached(handle, 1).to(tl.float32))
    elif KIND == "barrier, bases":
        iris.barrier(handle.bases)
    elif KIND == "peer, handle last":
        iris.peer.store(data, 1.0, 0, handle)
    elif KIND == "load, handle for bases":
        tl.store(data, iris.load(data, 0, 0, handle))
    elif KIND == "store, bases first":
        iris.store(handle.bases, data, 1.0, 0, 0)
    elif KIND == "store, data for bases":
        iris.store(data, 1.0, 0, 0, data)
    elif KIND == "hinted store, data for bases":
        iris.store(data + tl.arange(0, 2), 1.0, 0, 0, data, hint=2)
    elif KIND == "atomic, handle first":
        iris.atomic_add(handle, data, 1.0, 0, 0)
    elif KIND == "and of floats":
        iris.atomic_and(data, 1, 0, 0, handle.bases)
    elif KIND == "xor of floats":
        iris.peer.atomic_xor(handle, data, 1, 0)
    elif KIND == "cas of 1.5":
        iris.atomic_cas(flag, 1.5, 2, 0, 0, handle.bases)
    elif KIND == "cas of a float":
        iris.peer.atomic_cas(handle, flag, 1, tl.load(data), 0)
    elif KIND == "signal of 1.5":
        iris.signal(flag, 1.5, 0, handle)
    elif KIND == "signal_add of a float":
        iris.signal_add(flag, tl.load(data), 0, handle)
    elif KIND == "wait for a float":
        iris.wait(flag, tl.load(data), 0, handle)
    elif KIND == "wait_all for floats":
        lanes = tl.arange(0, 2)
        iris.wait_all(flag + lanes, lanes * 1.0, lanes * 0, lanes < 2, handle)
    elif KIND == "wait, handle before peer":
        iris.wait(flag, 1, handle, 0)
    elif KIND == "wait, flag for peer":
        iris.wait(flag, 1, flag, handle)
    elif KIND == "signal, data for peer":
        iris.signal(flag, 1, data, handle)
    elif KIND == "signal_all, handle before valid":
        iris.signal_all(flag, 1, handle, 0, True)
    elif KIND == "signal_all, no handle":
        iris.signal_all(flag, 1, 0, True, handle.bases)
    elif KIND == "load, data for rank":
        tl.store(data, iris.peer.load(handle, data, data))
    elif KIND == "store, mask for peer":
        lanes = tl.arange(0, 2)
        iris.peer.store(handle, data + lanes, 1.0, lanes < 1)
    elif KIND == "load, True for rank":
        tl.store(data, iris.peer.load(handle, data, True))
    elif KIND == "words of floats":
        store_words(data + tl.arange(0, 2), tl.arange(0, 2))
    elif KIND == "floats as words":
        store_words(flag + tl.arange(0, 2), tl.arange(0, 2) * 1.0)
    elif KIND == "words taken of a row":
        take_words(flag + tl.arange(0, 128), 1, tl.arange(0, 1), True, handle)
    elif KIND == "words taken of floats":
        take_words((data + tl.arange(0, 128))[None, None, :], 1, tl.arange(0, 1), True, handle)
    elif KIND == "words of one peer":
        take_words((flag + tl.arange(0, 128))[None, None, :], 1, 0, True, handle)
    elif KIND == "words, no handle":
        take_words((flag + tl.arange(0, 128))[None, None, :], 1, tl.arange(0, 1), True, handle.bases)
    elif KIND == "copy, data for rank":
        iris.copy(data, data + 1, 0, data, 0, handle.bases)
    elif KIND == "barrier_among, handle first":
        iris.barrier_among(handle, flag, 1)
    elif KIND == "barrier_among, handle second":
        iris.barrier_among(flag, handle, 1)
    elif KIND == "barrier_among, bases last":
        iris.barrier_among(flag, 1, handle.bases)
    elif KIND == "wait of a site of ones own":
        iris.wait(flag, 0, 0, handle, site="mine")
    elif KIND == "store of a pointer":
        iris.peer.store(handle, handle.bases, data, 0)
    elif KIND == "store of a handle":
        iris.store(handle.bases, handle, 0, 0, handle.bases)
    elif KIND == "add of a pointer":
        iris.atomic_add(handle.bases, data, 0, 0, handle.bases)
    elif KIND == "sub of a pointer":
        iris.peer.atomic_sub(handle, handle.bases, data, 0)
    elif KIND == "sub, handle first":
        iris.atomic_sub(handle, data, 1.0, 0, 0)
    elif KIND == "put of a value":
        iris.peer.put(handle, tl.load(data), data, 0)
    elif KIND == "get to a number":
        iris.get(data, 1, 0, 0, handle.bases)
    elif KIND == "store, block of data for bases":
        iris.store(handle.bases, 1, 0, 0, handle.bases + tl.arange(0, 2))
    elif KIND == "store with a modifier of loads":
        iris.peer.store(handle, data, 1.0, 0, cache_modifier=".ca")
    elif KIND == "get with both modifiers swapped":
        iris.peer.get(handle, data, data, 0, load_cache_modifier=".wt", store_cache_modifier=".cv")
    else:
        tl.static_assert(KIND == "wait for a block")
        lanes = tl.arange(0, 2)
        iris.wait(flag + lanes, lanes + 1, 0, handle)
