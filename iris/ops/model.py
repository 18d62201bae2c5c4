"""How long an op takes with a config, from the hardware's figures: arithmetic only, no GPU.

A matmul is tiles, dealt round to programs; what moves is bytes over a rate and a time per copy and flag. Each
algorithm puts the two together as it does: one after the other, side by side, or tile by tile as parts arrive. A
program that waits for a part ends no sooner than the part is there plus its tiles from then on; the latest end counts.

How far off it is: beside 784 calls measured on 1, 2 and 4 × H200 (tests/data/h200_measured.json: all ops, bf16, 512 to
16384 rows, 2026-11-21 to 23) a prediction is 4 % off in the median, and between 0.72 and 1.37 times the measured time;
nine of ten are within 0.90 and 1.12. Clocks alone make 10 % between two measurements of the same. Of the configs
measured for a shape, the one that it predicts to be fastest took 2 % more than the fastest on average, and 20 % more at
worst, over 161 shapes. Calls of ``hbm_buffer``, and of all-scatters by ``decomposed``, are not among them, as these
fetch and send otherwise since. Beside 1137 shapes of dataset/llm.json (1 to 16384 rows, results/) it is 5 % off in the
median, nine of ten are within 0.89 and 1.12, and all within 0.67 and 1.23. With ``own_matmul`` it is less sure: 25
calls of 16 to 128 rows lie between 0.70 and 1.40.

Nobody has measured 8 ranks beside it, or AMD GPUs. Beside 804 calls as one of 8 or 4 ranks for which two H200s
stand (tests/data/h200_mirrored.json: all ops, 16 to 16384 rows, benchmark/mirrored.py) it is 6 % off in the median,
nine of ten are within 0.91 and 1.27, and of the configs of 174 shapes the one that it prefers took 0.5 % more than the
fastest on average, and 7 % at worst. What is furthest off is slow: ``one_shot`` of wide matrices, and many chunks.

Of H100 it has only what data sheets say. Beside 244 calls on two H100s that stand for 8, 4 or 2 ranks
(tests/data/h100_mirrored.json, 2026-11-24) it is 5 % off in the median, and between 0.81 and 1.51 times; of the configs
of 55 shapes the one that it prefers took 2 % more than the fastest on average, and 18 % at worst.
"""

from __future__ import annotations

from collections.abc import Callable

from iris.ops.config import FusedConfig, in_words, tiles_in_words
from iris.ops.deal import Call, Deal, library_s
from iris.ops.hardware import Hardware
from iris.ops.machine import FLAG_S, LAUNCH_S, MEET_S, WORD_S, Machine, machine
from iris.ops.problem import Problem, output_dtype
from iris.ops.rows import abreast

_BESIDE, _BESIDE_WAVES = 0.6, 16
"""Where programs store to peers between their tiles: the share of the shorter of both that runs beside the other, after
so many waves; before, programs compute and store all at the same time."""
_ROUNDS_BESIDE, _ROUND_TILES = 0.1, 0.15
"""What many rounds add to that share, as sums are sent while others are still computed; and what each round costs, in
tiles, as programs wait for each other's."""
_SEND_S = 1.5e-6
"""A tile stored at its owner, and flagged there."""
_COLLECT_BYTES_PER_S = 32e9
"""At which a program reads the parts of its tile that peers have sent."""
_COLLECT_S = 1e-6
"""The least that it takes for one peer's."""
_GATHERED_S = 3e-6
"""A tile of a gather's takes this much longer than one of a matmul alone."""
_TILE_WORDS_S = 2e-6
"""The last tile's words, beside their bytes, from when they are stored until they have been added up: of each peer, as
nobody has measured more than one."""
_KEEP_S = 4.5e-6
"""A tile stored for the copy engine, and counted."""
_CROWDED = 1.15
"""How much longer copies take of what the matmul has just written, to where it will read."""
_COUNT_S = 8e-6
"""Programs telling each other that all of them have stored their share."""
_STEP_S, _AWAITED_STEP_S = 1.5e-6, 3e-6
"""From one matmul of the library's to the next; and with a kernel that waits between them, on the same lane."""
_EXCHANGE_S = 2.2e-6
"""From the library's matmul to the end of an exchange, or the other way round, beside bytes and flags."""
_FLAGGING_S = 2e-6
"""The fence behind the data of the first hop, and the flag's way."""
_HOP_S = 1.2e-6
"""What a second hop takes beside its bytes."""
_LANES_APART = 0.3
"""The share of what whole waves of chunks cost that two lanes leave."""
_READING_S = 4e-6
"""What a chunk of few rows takes beside reading all of B."""
_PULL_STEP_S = 4e-6
"""``pull``: one block of K from a peer, waited for."""
_PIECES_S = 40e-6
"""``hbm_buffer``: the first tiles wait piece by piece, and fill their pipeline anew behind each."""
_SENDING_S, _ASKED_S = 2e-6, 0.2e-6
"""``push`` by programs that only send: from a kernel's start to the first stores; and what each piece of its rows costs
a tile, on average, as many are there before they are asked for."""
_SENT_BESIDE, _NARROW = 1.14, 1.2
"""How much longer the wire takes there if the matmul takes as long; and tiles of less than 128 columns."""
_ARRIVALS = 4
"""Rows of tiles for which an arrival is looked at, of each part."""


def predict_ms(problem: Problem, config: FusedConfig, hardware: Hardware) -> float:
    """Milliseconds from when all ranks have begun a call until the last has finished, on the device.

    Args:
        problem: the call.
        config: with one of the op's algorithms, not ``"auto"``.
        hardware: whose figures to take.

    Raises:
        KeyError: the op has no such algorithm, or the hardware no rate for the dtype.
    """
    return 1e3 * predicted_s(problem, config, machine(hardware, problem.dtype))


def predicted_s(problem: Problem, config: FusedConfig, rates: Machine) -> float:
    """As :func:`predict_ms`, in seconds, for one who asks for many configs."""
    return _ALGORITHMS[problem.op, config.algorithm](Call(problem, config, rates))


def _exchange_s(call: Call, sent_nbytes: float, kept_nbytes: float, hops: int = 1) -> float:
    """Through inboxes, which peers write and this rank reads, as words if it is little; ``sent_nbytes`` in each hop, of
    which a second one goes past the inbox if it is not by words. ``kept_nbytes`` of results then go to memory."""
    words = in_words(sent_nbytes, call.world, hops)
    carried_nbytes, inboxes = (2 * sent_nbytes, hops) if words else (sent_nbytes, 1)
    waiting = (0.0 if words else _FLAGGING_S) + (hops - 1) * _HOP_S
    crossing = hops * call.machine.store_s(carried_nbytes, call.programs(), call.world)
    moved_nbytes = 2 * inboxes * carried_nbytes + kept_nbytes
    return _EXCHANGE_S + waiting + crossing + moved_nbytes / call.machine.memory_rate


def _multiplied(call: Call) -> float:
    """The whole matmul, before or behind an exchange."""
    return _local(call) if call.config.own_matmul else library_s(call)


def _output_exchanged(call: Call) -> float:
    """Every rank's columns go to all."""
    return _multiplied(call) + _exchange_s(call, (call.world - 1) * call.output_nbytes, call.world * call.output_nbytes)


def _sum_exchanged(call: Call) -> float:
    """Every rank's product goes to all."""
    return _multiplied(call) + _exchange_s(call, (call.world - 1) * call.output_nbytes, call.output_nbytes)


def _sum_exchanged_twice(call: Call) -> float:
    """Parts of the product to their owners, and their sums to all."""
    return _multiplied(call) + _exchange_s(call, _sent_nbytes(call), call.output_nbytes, hops=2)


# -- all-gather + matmul ------------------------------------------------------------------------------------


def _by_columns(call: Call) -> bool:
    return call.problem.gather_dim == 1


def _gather_deal(call: Call, reserved: int = 0, *, together: bool = False) -> Deal:
    """``together``: the rows of all ranks come side by side."""
    if _by_columns(call):
        return call.deal(call.rows * call.columns, reserved)
    shard = call.shard_rows * call.columns
    passes = call.passes
    if together:  # each wave reads B once
        passes = min(passes, -(-call.world * shard // call.programs(reserved)))
    return call.deal(call.world * shard, reserved, shard, _GATHERED_S, passes)


def _keep_own_s(call: Call) -> float:
    """Where A is cut by columns, programs copy the own part first."""
    return 2 * call.part_nbytes / call.machine.memory_rate if _by_columns(call) else 0.0


def _gather_copied(call: Call) -> float:
    rows = call.rows if _by_columns(call) else call.shard_rows
    chunks, per_chunk = call.chunks(call.config.num_chunks, rows)
    each = _sending_s(call, 1 / chunks)
    deal, arrivals = _gather_deal(call), []
    for step in range(1, call.world):
        for chunk in range(chunks):
            first = call.first_tile(chunk * per_chunk)
            if _by_columns(call):
                ready = (chunk * (call.world - 1) + step) * each
                arrivals.append((ready + FLAG_S, first, step / call.world))
            else:
                ready = ((step - 1) * chunks + chunk + 1) * each
                arrivals.append((ready + FLAG_S, step * call.shard_rows * call.columns + first, 0.0))
    return LAUNCH_S + max(_keep_own_s(call) + deal.total_s, deal.end_s(arrivals)) + MEET_S


def _gather_pushed(call: Call) -> float:
    if call.config.comm_sms is not None:
        return _gather_sent(call, call.config.comm_sms)
    programs = call.programs()
    pushing = call.machine.store_s((call.world - 1) * call.part_nbytes, programs, call.world)
    return LAUNCH_S + MEET_S + pushing + _keep_own_s(call) + _COUNT_S + FLAG_S + _gather_deal(call).total_s


def _gather_sent(call: Call, senders: int) -> float:
    """Pieces, as many at a time as there are senders: some chunks of rows side by side, then the next ones, by columns
    the own ones among them. A tile begins with the first piece of its rows, and ends behind the last."""
    config, world, by_columns = call.config, call.world, _by_columns(call)
    senders = min(senders, call.programs() - 1)
    deal = _gather_deal(call, senders, together=True)
    part_m = call.problem.m if by_columns else call.problem.m // world or 1
    part_k = call.problem.k // world or 1 if by_columns else call.problem.k
    piece_k = min(config.k_per_flag * config.block_size_k, part_k)
    nbytes = min(config.block_size_m, part_m) * piece_k * call.problem.dtype.itemsize
    pieces = -(-part_k // piece_k) * (world if by_columns else 1)
    rows = call.rows if by_columns else call.shard_rows
    chunks = rows if by_columns else (world - 1) * rows
    tiles = (1 if by_columns else world) * rows * call.columns
    beside = max(1, abreast(chunks, tiles, deal.workers, call.columns, config.group_size_m))
    crossing = call.machine.store_s((world - 1) * call.part_nbytes, senders, world)
    crossing *= 1 + (_SENT_BESIDE - 1) * min(1.0, deal.total_s / crossing) if crossing else 1.0
    each = max(call.machine.send_s(nbytes), crossing * senders / max(1, chunks * pieces))

    def sent(count: float) -> float:
        return max(1.0, count / senders) * each + FLAG_S

    def first_tile(chunk: int) -> int:
        turn = 0 if by_columns else 1 + chunk // rows
        return turn * rows * call.columns + call.first_tile(chunk % rows)

    arrivals = []
    turns = -(-chunks // beside)
    for turn in {0, turns // 2, turns - 1} if turns else ():
        begin, end = turn * beside, min((turn + 1) * beside, chunks)
        arrivals.append((sent(begin * pieces + end - begin), first_tile(begin), 0.0))
        arrivals.append((sent(end * pieces), first_tile(end - 1), 1 - 1 / pieces))
    computing = deal.end_s(arrivals) * (_NARROW if config.block_size_n < 128 else 1.0)
    return LAUNCH_S + _SENDING_S + pieces * _ASKED_S + computing


def _gather_fetched(call: Call) -> float:
    config, machine_, world = call.config, call.machine, call.world
    fetchers = config.comm_sms or max(1, call.programs() // 8)
    first = max(fetchers, config.first_stage_fetch_sms or 0)
    deal = _gather_deal(call, min(fetchers, call.programs() - 1), together=True)
    item = call.problem.dtype.itemsize
    tile = config.comm_block_m * config.comm_block_n * item
    part_m = call.problem.m if _by_columns(call) else call.problem.m // world
    part_k = call.problem.k // world if _by_columns(call) else call.problem.k
    piece = min(config.block_size_m, part_m) * min(config.k_per_flag * config.block_size_k, part_k) * item
    parts = world if _by_columns(call) else world - 1
    nbytes = parts * call.part_nbytes
    first_share = 1 / config.num_fetch_stages
    first_s = machine_.fetch_s(nbytes, first, tile, piece, world)
    later_s = machine_.fetch_s(nbytes, fetchers, tile, piece, world)

    def ready(share: float) -> float:
        return MEET_S + min(share, first_share) * first_s + max(0.0, share - first_share) * later_s

    rows = call.rows if _by_columns(call) else call.shard_rows
    shard = 0 if _by_columns(call) else rows * call.columns
    pieces = max(1, call.problem.k // (config.block_size_k * config.k_per_flag))
    arrivals = []
    for turn in range(1 if _by_columns(call) else world - 1):
        for row in {round(place * (rows - 1) / (_ARRIVALS - 1)) for place in range(_ARRIVALS)}:
            share = (row + 1) / rows if _by_columns(call) else (turn + (row + 1) / rows) / parts
            arrivals.append((ready(share), (turn + 1) * shard + call.first_tile(row), 1 - 1 / pieces))
    return LAUNCH_S + _PIECES_S + deal.end_s(arrivals) + MEET_S


def _gather_pulled(call: Call) -> float:
    """Every tile of A that is not the own one crosses the link for each tile of the output beside it."""
    nbytes = (call.world - 1) * call.part_nbytes * call.columns
    crossing = call.machine.load_s(nbytes, call.programs(), call.world)
    deal = _gather_deal(call)
    own = deal.total_s / call.world
    remote_tiles = deal.left(0) * (call.world - 1) / call.world
    crossing = max(crossing, remote_tiles * call.problem.k / call.config.block_size_k * _PULL_STEP_S)
    return LAUNCH_S + 2 * MEET_S + own + max(deal.total_s - own, crossing)


def _chunk_s(call: Call, share: float) -> float:
    """The library's matmul of a chunk of rows, two of which run side by side: a chunk's last wave is shared with the
    next one's first."""
    computing = share * (_LANES_APART * library_s(call, 1 / share) + (1 - _LANES_APART) * library_s(call))
    return max(computing, share * call.machine.memory_s(call.config, call.problem, 1 / share) + _READING_S)


def _gather_decomposed(call: Call) -> float:
    """The library's matmul of each chunk when it has come; of rows the own ones first, and only the last part in
    chunks."""
    world, by_columns = call.world, _by_columns(call)
    end = ready = 0.0
    if not by_columns:
        part, each = _chunk_s(call, 1 / world), _sending_s(call)
        end, ready = part, (world - 2) * each
        for step in range(1, world - 1):
            end = max(end, step * each + FLAG_S) + _STEP_S + part
    for share in call.shares(call.problem.m if by_columns else call.problem.m // world or 1):
        keeping = share * _keep_own_s(call) + LAUNCH_S if by_columns else 0.0
        ready += (world - 1 if by_columns else 1) * _sending_s(call, share)
        end = max(end + keeping, ready + FLAG_S) + _STEP_S + _chunk_s(call, share if by_columns else share / world)
    return LAUNCH_S + end + MEET_S


def _sending_s(call: Call, share: float = 1.0) -> float:
    """A copy of so much of a part to a peer, and the flag behind it."""
    return call.machine.copy_s(share * call.part_nbytes) + WORD_S


def _gather_exchanged(call: Call) -> float:
    return _multiplied(call) + _exchange_s(call, (call.world - 1) * call.part_nbytes, 0.0)


def _gather_then(call: Call) -> float:
    pushing = call.machine.store_s((call.world - 1) * call.part_nbytes, call.programs(), call.world)
    copying = 2 * call.part_nbytes / call.machine.memory_rate
    return LAUNCH_S + 2 * MEET_S + _COUNT_S + pushing + copying + library_s(call)


# -- matmul + all-scatter -----------------------------------------------------------------------------------


def _beside(deal: Deal, storing_s: float, share: float = _BESIDE) -> float:
    """Programs that compute tiles and store them to peers; ``share``: how much of the shorter runs beside the other."""
    drifted = min(1.0, max(0.0, deal.left(0) - 1) / _BESIDE_WAVES)
    longer, shorter = max(deal.total_s, storing_s), min(deal.total_s, storing_s)
    return longer + (1 - share * drifted) * shorter


def _scatter_pushed(call: Call) -> float:
    deal = call.deal(call.rows * call.columns, crowded=True)
    storing = call.machine.store_s((call.world - 1) * call.output_nbytes, call.programs(), call.world)
    return LAUNCH_S + _beside(deal, storing) + MEET_S


def _scatter_chunks(call: Call, wanted: int | None) -> tuple[int, int]:
    """Chunks are whole groups of block rows: how many, and groups in each."""
    groups = -(-call.rows // call.config.group_size_m)
    return call.chunks(min(wanted or groups, groups), groups)


def _scatter_behind(call: Call, deal: Deal, chunks: int, each_s: float) -> float:
    """Chunks of the output are sent as they are finished, each taking ``each_s``."""
    sent = 0.0
    for chunk in range(chunks):
        sent = max(sent, deal.done_s((chunk + 1) / chunks)) + each_s
    return LAUNCH_S + sent + MEET_S


def _scatter_copied(call: Call) -> float:
    deal = call.deal(call.rows * call.columns, tile_s=_KEEP_S)
    chunks, _ = _scatter_chunks(call, call.config.num_chunks)
    each = (call.world - 1) * call.machine.copy_s(call.output_nbytes // chunks) + 2 * WORD_S
    return _scatter_behind(call, deal, chunks, each) + LAUNCH_S


def _scatter_split(call: Call) -> float:
    senders = call.config.comm_sms or max(1, call.programs() // 8)
    deal = call.deal(call.rows * call.columns, min(senders, call.programs() - 1), tile_s=_KEEP_S)
    chunks, _ = _scatter_chunks(call, None)
    nbytes = (call.world - 1) * call.output_nbytes / chunks
    return _scatter_behind(call, deal, chunks, call.machine.store_s(nbytes, senders, call.world) + FLAG_S)


def _scatter_streams(call: Call) -> float:
    return _scatter_split(call) + LAUNCH_S


def _scatter_decomposed(call: Call) -> float:
    """The library's matmul of each chunk of rows, copies to all peers behind it; the last one stored by a kernel."""
    *shares, last = call.shares(call.problem.m)
    computed = sent = 0.0
    for share in shares:
        computed += share * library_s(call, 1 / share) + _STEP_S
        sent = max(sent, computed) + (call.world - 1) * call.machine.copy_s(share * call.output_nbytes)
    computed += last * library_s(call, 1 / last) + _STEP_S
    storing = call.machine.store_s((call.world - 1) * last * call.output_nbytes, call.programs(), call.world)
    return 2 * LAUNCH_S + max(sent, computed) + storing + MEET_S


def _scatter_then(call: Call) -> float:
    storing = call.machine.store_s((call.world - 1) * call.output_nbytes, call.programs(), call.world)
    return library_s(call) + LAUNCH_S + storing + 2 * MEET_S


# -- matmul + reduce-scatter, matmul + all-reduce -----------------------------------------------------------


def _sent_nbytes(call: Call) -> float:
    """What a rank sends to the owners of its tiles."""
    return call.output_nbytes * (call.world - 1) / call.world


def _owner_copy_s(call: Call, share: float = 1.0) -> float:
    """A copy of so much of one owner's rows."""
    return call.machine.copy_s(share * call.output_nbytes / call.world)


def _collect_s(call: Call) -> float:
    """One tile's parts from all peers, read by the program that has computed the own."""
    nbytes = call.config.tile_elements * output_dtype(call.problem.dtype).itemsize
    return (call.world - 1) * max(_COLLECT_S, nbytes / _COLLECT_BYTES_PER_S)


def _own_waves(call: Call, deal: Deal) -> int:
    """Own tiles of one program."""
    return -(-(deal.whole // call.world or 1) // deal.workers)


def _sum_pushed(call: Call, tiles: int, returned_nbytes: float, item: float = 1.0) -> float:
    """Tiles are stored to their owners, item times as large as the output's; sums are stored to all."""
    deal = call.deal(tiles, tile_s=_SEND_S)
    nbytes = item * _sent_nbytes(call) + returned_nbytes
    storing = call.machine.store_s(nbytes, call.programs(), call.world)
    rounds = min(call.config.num_rounds, _own_waves(call, deal)) if returned_nbytes else 1
    moving = _beside(deal, storing, _BESIDE + _ROUNDS_BESIDE * (1 - 1 / rounds))
    waiting = _own_waves(call, deal) * _collect_s(call) + (rounds - 1) * _ROUND_TILES * deal.tile_s
    return LAUNCH_S + moving + waiting + MEET_S + 2 * FLAG_S


def _scatter_sum_pushed(call: Call) -> float:
    return _sum_pushed(call, call.world * call.shard_rows * call.columns, 0.0)


def _scatter_sum_added(call: Call) -> float:
    return _sum_pushed(call, call.world * call.shard_rows * call.columns, 0.0, item=4.0)


def _scatter_sum_copied(call: Call) -> float:
    """Chunks for an owner are copied when they are finished; own tiles come last and wait for the peers' chunks."""
    shard = call.shard_rows * call.columns
    chunks, _ = call.chunks(call.config.num_chunks, shard)
    deal = call.deal(call.world * shard, tile_s=_KEEP_S, passes=call.passes)
    each = _CROWDED * _owner_copy_s(call, 1 / chunks) + 2 * WORD_S + FLAG_S
    sent, arrivals = 0.0, []
    for step in range(call.world - 1):
        for chunk in range(chunks):
            finished = deal.done_s((step + (chunk + 1) / chunks) / call.world)
            sent = max(sent, finished) + each
            if step == call.world - 2:
                arrivals.append((sent, (call.world - 1) * shard + chunk * shard // chunks, 1.0))
    collecting = _own_waves(call, deal) * _collect_s(call)
    return LAUNCH_S + deal.end_s(arrivals) + collecting + MEET_S


def _reduce_pushed(call: Call) -> float:
    return _sum_pushed(call, call.rows * call.columns, _sent_nbytes(call))


def _reduce_added(call: Call) -> float:
    return _sum_pushed(call, call.rows * call.columns, _sent_nbytes(call), item=4.0) + MEET_S


def _reduce_everywhere(call: Call) -> float:
    """Every rank gets the parts of all."""
    tiles = call.rows * call.columns
    deal, nbytes = call.deal(tiles), tiles * call.config.tile_elements * output_dtype(call.problem.dtype).itemsize
    if tiles_in_words(nbytes, call.world):
        storing = call.machine.store_s(2 * (call.world - 1) * call.output_nbytes, call.programs(), call.world)
        return LAUNCH_S + deal.total_s + storing + (call.world - 1) * _TILE_WORDS_S
    loading = call.machine.load_s((call.world - 1) * call.output_nbytes, call.programs(), call.world)
    return LAUNCH_S + deal.total_s + loading + 2 * MEET_S


def _reduce_copied(call: Call) -> float:
    """In rounds: tiles to their owners, then sums to all, the sums of one round behind the tiles of the next."""
    shard, world = call.shard_rows * call.columns, call.world
    groups = -(-call.shard_rows // call.config.group_size_m)
    chunks, _ = call.chunks(call.config.num_chunks, groups)
    deal = call.deal(world * shard, tile_s=_KEEP_S, passes=call.passes)
    spreading = _CROWDED * _owner_copy_s(call, 1 / chunks)
    each = spreading + 2 * WORD_S
    computing = deal.total_s / chunks
    collecting = _own_waves(call, deal) * _collect_s(call) / chunks
    copied = computed = summed = 0.0
    for chunk in range(chunks + 1):
        before = summed
        if chunk < chunks:
            for step in range(1, world):
                copied = max(copied, computed + computing * step / world) + each + WORD_S
            computed = summed = max(computed + computing, copied + FLAG_S) + collecting
        if chunk > 0:
            copied = max(copied, before) + (world - 1) * spreading + 2 * WORD_S
    return LAUNCH_S + max(copied, computed) + LAUNCH_S + MEET_S


def _scatter_sum_decomposed(call: Call) -> float:
    """The library's matmul for each owner, a copy behind each; then a kernel that sums."""
    computing = library_s(call, call.world) / call.world
    each = _owner_copy_s(call) + WORD_S
    sent = 0.0
    for step in range(1, call.world):
        sent = max(sent, step * (computing + _STEP_S)) + each
    summing = (call.world + 1) * call.output_nbytes / call.world / call.machine.memory_rate
    return max(call.world * (computing + _STEP_S), sent + FLAG_S) + LAUNCH_S + summing + MEET_S


def _ring(call: Call, *, everywhere: bool) -> float:
    """Sums travel from rank to rank by chunks, the library's matmul of each behind its arrival; at the end they are
    copied to their place, or to all ranks."""
    chunks, _ = call.chunks(call.config.num_chunks, call.shard_rows)
    computing = library_s(call, call.world * chunks) / (call.world * chunks)
    spreading = _owner_copy_s(call, 1 / chunks)
    each = spreading + WORD_S
    owned = call.output_nbytes / call.world / chunks
    arrived = [0.0] * chunks
    computed = sent = 0.0
    for step in range(call.world):
        for chunk in range(chunks):
            computed = max(computed, arrived[chunk]) + computing + _AWAITED_STEP_S
            if step < call.world - 1:
                sent = max(sent, computed) + each
                arrived[chunk] = sent + FLAG_S
            elif everywhere:
                sent = max(sent, computed) + (call.world - 1) * spreading
            else:
                computed += 2 * owned / call.machine.memory_rate + _AWAITED_STEP_S
    return 2 * LAUNCH_S + max(computed, sent) + (MEET_S if everywhere else 0.0)


def _reduce_decomposed(call: Call) -> float:
    """Chunk by chunk: the library's matmul for each owner, a copy behind each; sums, and copies of these to all, beside
    the next chunk's; the last ones stored by the kernel that sums."""
    world, summing, spreading = call.world, 0.0, 0.0
    computed = sent = landed = 0.0
    for chunk, share in enumerate(call.shares(call.problem.m // world or 1)):
        part, before = share / world, landed
        computing = part * library_s(call, 1 / part) + _STEP_S
        for step in range(1, world + 1):
            computed += computing
            if step < world:
                sent = max(sent, computed) + _owner_copy_s(call, share) + WORD_S
                landed = sent + FLAG_S
            if chunk > 0 and step == (world + 1) // 2:  # the sums of the chunk before
                computed = max(computed, before) + summing
                sent = max(sent, computed) + (world - 1) * spreading
        summing = _AWAITED_STEP_S + (world + 1) * part * call.output_nbytes / call.machine.memory_rate
        spreading = _owner_copy_s(call, share)
    storing = call.machine.store_s((world - 1) * part * call.output_nbytes, call.programs(), world)
    return 2 * LAUNCH_S + max(sent, max(computed, landed) + summing) + storing + MEET_S


def _scatter_sum_ring(call: Call) -> float:
    return _ring(call, everywhere=False)


def _reduce_ring(call: Call) -> float:
    return _ring(call, everywhere=True)


def _scatter_sum_exchanged(call: Call) -> float:
    return _multiplied(call) + _exchange_s(call, _sent_nbytes(call), call.output_nbytes / call.world)


def _scatter_sum_then(call: Call) -> float:
    loading = call.machine.load_s(_sent_nbytes(call), call.programs(), call.world)
    return library_s(call) + LAUNCH_S + loading + 2 * MEET_S


def _reduce_then(call: Call) -> float:
    storing = call.machine.store_s(_sent_nbytes(call), call.programs(), call.world)
    return _scatter_sum_then(call) + storing + MEET_S


def _local(call: Call) -> float:
    return LAUNCH_S + call.deal(call.rows * call.columns, crowded=True).total_s


_ALGORITHMS: dict[tuple[str, str], Callable[[Call], float]] = {
    ("all_gather_matmul", "pull"): _gather_pulled,
    ("all_gather_matmul", "push"): _gather_pushed,
    ("all_gather_matmul", "hbm_buffer"): _gather_fetched,
    ("all_gather_matmul", "copy_engine"): _gather_copied,
    ("all_gather_matmul", "decomposed"): _gather_decomposed,
    ("all_gather_matmul", "low_latency"): _gather_exchanged,
    ("all_gather_matmul", "baseline"): _gather_then,
    ("matmul_all_scatter", "push"): _scatter_pushed,
    ("matmul_all_scatter", "split"): _scatter_split,
    ("matmul_all_scatter", "streams"): _scatter_streams,
    ("matmul_all_scatter", "copy_engine"): _scatter_copied,
    ("matmul_all_scatter", "decomposed"): _scatter_decomposed,
    ("matmul_all_scatter", "low_latency"): _output_exchanged,
    ("matmul_all_scatter", "baseline"): _scatter_then,
    ("matmul_reduce_scatter", "push"): _scatter_sum_pushed,
    ("matmul_reduce_scatter", "copy_engine"): _scatter_sum_copied,
    ("matmul_reduce_scatter", "decomposed"): _scatter_sum_decomposed,
    ("matmul_reduce_scatter", "ring"): _scatter_sum_ring,
    ("matmul_reduce_scatter", "atomic"): _scatter_sum_added,
    ("matmul_reduce_scatter", "low_latency"): _scatter_sum_exchanged,
    ("matmul_reduce_scatter", "baseline"): _scatter_sum_then,
    ("matmul_all_reduce", "atomic"): _reduce_added,
    ("matmul_all_reduce", "one_shot"): _reduce_everywhere,
    ("matmul_all_reduce", "two_shot"): _reduce_pushed,
    ("matmul_all_reduce", "copy_engine"): _reduce_copied,
    ("matmul_all_reduce", "decomposed"): _reduce_decomposed,
    ("matmul_all_reduce", "ring"): _reduce_ring,
    ("matmul_all_reduce", "low_latency"): _sum_exchanged,
    ("matmul_all_reduce", "low_latency_two_shot"): _sum_exchanged_twice,
    ("matmul_all_reduce", "baseline"): _reduce_then,
    ("matmul", "local"): _local,
}
"""What predicts each algorithm of each op."""


OPS = tuple(dict.fromkeys(op for op, _ in _ALGORITHMS))
"""All ops."""


def algorithms(op: str) -> tuple[str, ...]:
    """The algorithms of ``op``."""
    return tuple(algorithm for one, algorithm in _ALGORITHMS if one == op)
