"""Which weights of attention dropout keeps: a hash of the seed, the query and the key, so that nothing is stored.

The rounds are those of lowbias32 (Wellons, https://github.com/skeeto/hash-prospector), with a key of the query between
them.
"""

# mypy: disable-error-code="assignment, misc"

import triton
import triton.language as tl


@triton.jit
def _mixed(x, key):
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ key ^ (x >> 15)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def query_keys(seed, i_bh, o_q, P):
    """Two random numbers for each query, from the seed, an int64 on the device."""
    b_seed = tl.load(seed)
    first, second = b_seed.to(tl.uint32), (b_seed >> 32).to(tl.uint32)
    row = (i_bh * P + o_q).to(tl.uint32)
    b_key = _mixed(row ^ first, second)
    return b_key, _mixed(b_key ^ second, first)


@triton.jit
def kept(b_key_1, b_key_2, o_k, threshold):
    """Whether weights are kept, for keys of queries and positions that broadcast. threshold: 2^32 times the rate."""
    # neighbouring positions differ in many bits from the start
    return _mixed(b_key_1 + o_k.to(tl.uint32) * 0x9E3779B9, b_key_2) >= threshold.to(tl.uint32)
