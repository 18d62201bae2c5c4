"""Which tile a program computes next, and which part of its K.

A matmul's tiles are numbered in the order in which they are to be computed; a *schedule* says which tile a number
stands for. It is a ``@triton.jit`` function passed as constexpr, and may be the user's own:

    SCHEDULE(item, me, per_shard, per_round, m_blocks, n_blocks, GROUP_M, SHARDS) -> (shard, index, block_m, block_n)

``shard`` is the rank that the tile belongs to, ``index`` its number among that rank's ``per_shard`` tiles,
``block_m`` and ``block_n`` its place. Tiles come in rounds of ``per_round`` tiles of every shard whose turn it is.
"""

import triton
import triton.language as tl

MOST_PARTS: tl.constexpr = tl.constexpr(15)
"""Programs that share a tile, or one more: with many, handing parts over takes longer than smaller parts save."""


@triton.jit
def grouped(tile, m_blocks, n_blocks, GROUP_M: tl.constexpr):
    """Tile number → (block row, block column), walking down ``GROUP_M`` rows before the next column.

    A wave of neighbouring tiles then shares few rows of A and few columns of B, which stay in L2 (the grouped
    order of the Triton matmul tutorial).
    """
    group = min(m_blocks, GROUP_M)  # so that no number exceeds that of all tiles
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
    """Shards of rows: all of this rank's own first, which needs no transfer; then, in rounds, those of the next ranks.

    As long as ranks are level, no two want the same peer's shard at the same time.
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
    """Shards of rows, beginning with the next rank's; the own ones last in each round, when the peers have sent theirs
    for them."""
    turn, index = _turn(item, per_shard, per_round, SHARDS)
    block_m, block_n = grouped(index, m_blocks, n_blocks, GROUP_M)
    return (me + 1 + turn) % SHARDS, index, block_m, block_n


@triton.jit
def dealt(item, me, per_shard, per_round, m_blocks, n_blocks, GROUP_M: tl.constexpr, SHARDS: tl.constexpr):
    """All tiles dealt to the ranks, neighbours to the same one, whatever their rows; the own ones of a round behind the
    others of the next round, when the peers' are here for sure; those of the last two behind all.

    Where ``per_shard`` × ``SHARDS`` exceeds the number of tiles, the last ones lie outside the matrix.
    """
    turn, index = _turn_own_late(item, per_shard, per_round, SHARDS)
    shard = (me + 1 + turn) % SHARDS
    block_m, block_n = grouped(shard * per_shard + index, m_blocks, n_blocks, GROUP_M)
    return shard, index, block_m, block_n


@triton.jit
def _turn_own_late(item, per_shard, per_round, SHARDS: tl.constexpr):
    """As :func:`_turn`, the last turn being the own one, which comes a round later."""
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

    With ``TWO_TILES`` every program is left between one and two tiles' worth to split, else less than one: the two
    variants of Osama et al., Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication
    on the GPU, PPoPP 2023.
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
    """How many workers, the first ones, share ``tiles`` of ``per_tile`` iterations: as many for each tile, and no more
    than its parts are worth handing over.

    More tiles than workers are shared by all, most of which then have parts of two. They stand at many places of K, and
    read from memory what neighbours would share in L2. With half as many tiles as workers that is still faster than
    half of them idle, with two thirds it is not.
    """
    evenly = workers // max(tiles, 1) * tiles
    straddling = (tiles > workers) | ((2 * tiles > workers) & (5 * tiles <= 3 * workers))
    return max(min(tl.where(straddling, workers, evenly), tiles * min(per_tile, MOST_PARTS)), 1)


@triton.jit
def split_start(worker, sharers, iterations):
    """The first of ``iterations`` that ``worker`` computes; those of the next worker follow."""
    worker = tl.minimum(worker, sharers)
    return worker * (iterations // sharers) + worker * (iterations % sharers) // sharers


@triton.jit
def split_worker(iteration, sharers, iterations):
    """The worker whose part ``iteration`` is in: the inverse of :func:`split_start`."""
    return (((iteration + 1).to(tl.int64) * sharers - 1) // iterations).to(tl.int32)
