"""Which tile a program computes next."""

import triton
import triton.language as tl


@triton.jit
def grouped(tile, m_blocks, n_blocks, GROUP_M: tl.constexpr):
    """Tile number → (block row, block column), walking down ``GROUP_M`` rows before the next column.

    A wave of neighbouring tiles then shares few rows of A and few columns of B, which stay in L2 (the grouped
    order of the Triton matmul tutorial).
    """
    group_size = GROUP_M * n_blocks
    first = tile // group_size * GROUP_M
    rows = min(m_blocks - first, GROUP_M)
    within = tile % group_size
    return first + within % rows, within // rows


@triton.jit
def sharded(tile, m_blocks, n_blocks, GROUP_M: tl.constexpr):
    """Tile number → (turn, block row in the shard, block column), shard by shard.

    Turn 0 is the rank's own shard, which needs no transfer; the others follow round the ring, so that no two ranks
    want the same peer's at the same time.
    """
    per_shard = m_blocks * n_blocks
    block_m, block_n = grouped(tile % per_shard, m_blocks, n_blocks, GROUP_M)
    return tile // per_shard, block_m, block_n
