"""Which tile a program computes next, and which part of its K.

A matmul's tiles are numbered in the order in which they are computed; a *schedule* says which tile a number stands for.
It is a ``@triton.jit`` function passed as constexpr, and users may write their own:

    SCHEDULE(item, me, per_shard, per_round, m_blocks, n_blocks, GROUP_M, SHARDS) -> (shard, index, block_m, block_n)

``shard`` is the rank that the tile belongs to, ``index`` its number among that rank's ``per_shard`` tiles,
``block_m`` and ``block_n`` its place. Where shards take turns, a round has ``per_round`` tiles of each.
"""

import triton
import triton.language as tl

MOST_PARTS: tl.constexpr = tl.constexpr(15)
"""Programs that share a tile, at most (or one more): beyond that, handing parts over costs more than smaller parts
save."""


@triton.jit
def grouped(tile, m_blocks, n_blocks, GROUP_M: tl.constexpr):
    """Tile number → (block row, block column), walking down ``GROUP_M`` block rows before the next block column.

    The tiles of a wave then share few rows of A and few columns of B, which stay in L2 (the grouped order of the
    Triton matmul tutorial).
    """
    group = min(m_blocks, GROUP_M)  # so that no product below exceeds the number of tiles
    group_size = group * n_blocks
    first = tile // group_size * group
    rows = max(min(m_blocks - first, group), 1)
    within = tile % group_size
    return first + within % rows, within // rows


@triton.jit
def _turn(item, per_shard, per_round, SHARDS: tl.constexpr):
    """Item → (turn round the ring, number within the shard)."""
    if SHARDS == 1:
        return item * 0, item
    else:
        done = item // (per_round * SHARDS) * per_round
        rest = item - done * SHARDS
        size = max(min(per_round, per_shard - done), 1)
        return rest // size, done + rest % size


@triton.jit
def own_first(item, me, per_shard, per_round, m_blocks, n_blocks, GROUP_M: tl.constexpr, SHARDS: tl.constexpr):
    """A sharded by rows: first all of this rank's own tiles, which need no transfer; then, in rounds, the next ranks'.

    As long as ranks advance together, no two need the same peer's shard at the same time.
    """
    if SHARDS == 1:
        turn, index = item * 0, item
    else:
        turn, index = _turn(max(item - per_shard, 0), per_shard, per_round, SHARDS - 1)
        turn, index = tl.where(item < per_shard, 0, turn + 1), tl.where(item < per_shard, item, index)
    block_m, block_n = grouped(index, m_blocks, n_blocks, GROUP_M)
    return (me + turn) % SHARDS, index, block_m, block_n


@triton.jit
def own_last(item, me, per_shard, per_round, m_blocks, n_blocks, GROUP_M: tl.constexpr, SHARDS: tl.constexpr):
    """Output sharded by rows: in each round the next rank's tiles first, and this rank's own last, when peers have sent
    their parts of these."""
    turn, index = _turn(item, per_shard, per_round, SHARDS)
    block_m, block_n = grouped(index, m_blocks, n_blocks, GROUP_M)
    return (me + 1 + turn) % SHARDS, index, block_m, block_n


@triton.jit
def dealt(item, me, per_shard, per_round, m_blocks, n_blocks, GROUP_M: tl.constexpr, SHARDS: tl.constexpr):
    """All tiles dealt to the ranks, consecutive ones to the same rank, whatever their rows. This rank's own tiles of a
    round come after the others' of the next round, when peers' parts of them have surely arrived; its own tiles of the
    last two rounds come last.

    Where ``per_shard`` × ``SHARDS`` exceeds the number of tiles, the last tiles lie outside the matrix.
    """
    turn, index = _turn_own_late(item, per_shard, per_round, SHARDS)
    shard = (me + 1 + turn) % SHARDS
    block_m, block_n = grouped(shard * per_shard + index, m_blocks, n_blocks, GROUP_M)
    return shard, index, block_m, block_n


@triton.jit
def _turn_own_late(item, per_shard, per_round, SHARDS: tl.constexpr):
    """As :func:`_turn`; the last turn is this rank's own, whose tiles come one round later."""
    if SHARDS == 1:
        return item * 0, item
    else:
        others: tl.constexpr = SHARDS - 1
        size = max(per_round, 1)
        which = min((item + size) // (size * SHARDS), tl.cdiv(per_shard, size) - 1)
        within = item - max(which * (size * SHARDS) - size, 0)
        length = max(min(size, per_shard - which * size), 1)
        own = within >= others * length
        own_index = max(which - 1, 0) * size + within - others * length
        return tl.where(own, others, within // length), tl.where(own, own_index, which * size + within % length)


@triton.jit
def whole_tiles(tiles, workers, STREAM_K: tl.constexpr, TWO_TILES: tl.constexpr):
    """How many of ``tiles`` are computed whole, each by one program; Stream-K splits the rest evenly.

    The rest is between one and two tiles' worth per program with ``TWO_TILES``, else less than one: the two variants
    of Osama et al., Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU,
    PPoPP 2023.
    """
    if STREAM_K:
        waves = tiles // workers
        if TWO_TILES:
            waves = max(waves - 1, 0)
        return tl.where(tiles % workers == 0, tiles, waves * workers)
    else:
        return tiles


@triton.jit
def split_sharers(tiles, per_tile, workers):
    """How many workers, the first ones, share ``tiles`` of ``per_tile`` iterations: the same number for each tile, at
    most :data:`MOST_PARTS`.

    If there are more tiles than workers, all workers share them, and most have parts of two tiles. Workers are then at
    different places of K, and read from memory what neighbours would otherwise share in L2. The same is done with a
    little over half as many tiles as workers: that is faster than leaving almost half of the workers idle. With two
    thirds it is slower.
    """
    evenly = workers // max(tiles, 1) * tiles
    straddling = (tiles > workers) | ((2 * tiles > workers) & (5 * tiles <= 3 * workers))
    return max(min(tl.where(straddling, workers, evenly), tiles * min(per_tile, MOST_PARTS)), 1)


@triton.jit
def split_start(worker, sharers, iterations):
    """The first of ``iterations`` that ``worker`` computes; it computes those up to the next worker's first."""
    worker = tl.minimum(worker, sharers)
    return worker * (iterations // sharers) + worker * (iterations % sharers) // sharers


@triton.jit
def split_worker(iteration, sharers, iterations):
    """The worker whose part ``iteration`` is in: the inverse of :func:`split_start`."""
    return (((iteration + 1).to(tl.int64) * sharers - 1) // iterations).to(tl.int32)
