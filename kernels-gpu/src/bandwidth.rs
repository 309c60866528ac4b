//! What benchmarks need beside the layer: reading and copying memory and multiplying registers with nothing else to do (the floors
//! that kernels are compared with), and filling memory with reproducible noise.

use cuda_std::memory::{In, Out};
use cuda_std::mma::{F16, m16n8k16};
use cuda_std::thread::{block_dim, block_idx, grid_dim, thread_idx};
use cuda_std::{kernels, sync};

/// Threads of a block.
pub const THREADS: u32 = 256;
/// Bytes that one block of `read` or `copy` handles: four 16-byte accesses a thread.
pub const BLOCK_BYTES: usize = THREADS as usize * 64;

/// Noise of all bytes.
pub const ANY: u32 = 0;
/// Noise of e4m3 bytes 0x08 to 0x47, from 2^-6 to just below 2^2, as block scales have.
pub const E4M3_SCALES: u32 = 1;
/// Noise of e8m0 bytes from 2^-11 to 2^-4.
pub const E8M0_SCALES: u32 = 2;

kernels! {
    /// Reads whole blocks of [`BLOCK_BYTES`] and keeps nothing.
    pub mod read(
        /// Bytes.
        from: In<u8>,
        /// `[1]` written only if all words of a thread cancel in a way that noise does not.
        sink: Out<u32>,
    );
    read_bytes[THREADS, 8] = |_A| read_body;
}

kernels! {
    /// Copies whole blocks of [`BLOCK_BYTES`].
    pub mod copy(
        /// Bytes.
        from: In<u8>,
        /// As many bytes.
        to: Out<u8>,
    );
    copy_bytes[THREADS, 8] = |_A| copy_body;
}

kernels! {
    /// Fills with noise.
    pub mod fill(
        /// Words.
        to: Out<u32>,
        /// Number of words, a multiple of 4.
        words: u64,
        /// Which noise.
        seed: u32,
        /// [`ANY`], [`E4M3_SCALES`] or [`E8M0_SCALES`].
        bytes_are: u32,
    );
    fill_noise[THREADS, 4] = |_A| fill_body;
}

/// mma of a warp in one round of `multiply`.
pub const ROUND: u32 = 16;

kernels! {
    /// Multiplies registers on the tensor cores: 16 independent chains a warp.
    pub mod multiply(
        /// Rounds of [`ROUND`] mma.
        rounds: u32,
        /// `[1]` written only if a sum is 1, which it never is.
        sink: Out<f32>,
    );
    multiply_f16[THREADS, 2] = |_A| multiply_body;
}

#[inline(always)]
fn multiply_body(rounds: u32, sink: Out<f32>) {
    // 2 and 3 in f16: every sum is a multiple of 6.
    let (a, b) = ([0x4000_4000u32; 4], [0x4200_4200u32; 2]);
    let mut sums = [[0.0f32; 4]; ROUND as usize];
    let mut round = 0;
    while round < rounds {
        sync::converge();
        let mut i = 0;
        while i < ROUND as usize {
            sums[i] = m16n8k16::<F16>(a, b, sums[i]);
            i += 1;
        }
        round += 1;
    }
    let mut i = 0;
    while i < ROUND as usize {
        if sums[i][0] == 1.0 || sums[i][1] == 1.0 || sums[i][2] == 1.0 || sums[i][3] == 1.0 {
            sink.store(0, sums[i][0]);
        }
        i += 1;
    }
}

#[inline(always)]
fn read_body(from: In<u8>, sink: Out<u32>) {
    let at = block_idx() as usize * BLOCK_BYTES + thread_idx() as usize * 16;
    let v = [0, 1, 2, 3].map(|i| from.stream_v4(at + i * THREADS as usize * 16));
    let words = [v[0][0] ^ v[1][0] ^ v[2][0] ^ v[3][0], v[0][1] ^ v[1][1] ^ v[2][1] ^ v[3][1]];
    let rest = [v[0][2] ^ v[1][2] ^ v[2][2] ^ v[3][2], v[0][3] ^ v[1][3] ^ v[2][3] ^ v[3][3]];
    if words[0] == 0x1234_5678 && words[1] == 0x9ABC_DEF0 && rest[0] == 0x0FED_CBA9 && rest[1] == 0x8765_4321 {
        sink.store(0, 1);
    }
}

#[inline(always)]
fn copy_body(from: In<u8>, to: Out<u8>) {
    let at = block_idx() as usize * BLOCK_BYTES + thread_idx() as usize * 16;
    let v = [0, 1, 2, 3].map(|i| from.stream_v4(at + i * THREADS as usize * 16));
    to.store_v4(at, v[0]);
    to.store_v4(at + THREADS as usize * 16, v[1]);
    to.store_v4(at + 2 * THREADS as usize * 16, v[2]);
    to.store_v4(at + 3 * THREADS as usize * 16, v[3]);
}

/// A 32-bit mix with good avalanche (the finaliser of MurmurHash3).
#[inline(always)]
fn mix(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x85EB_CA6B);
    x ^= x >> 13;
    x = x.wrapping_mul(0xC2B2_AE35);
    x ^ x >> 16
}

#[inline(always)]
fn fill_body(to: Out<u32>, words: u64, seed: u32, bytes_are: u32) {
    let step = grid_dim() as u64 * block_dim() as u64;
    let mut at = block_idx() as u64 * block_dim() as u64 + thread_idx() as u64;
    while at * 4 < words {
        let high = mix(seed ^ (at >> 30) as u32);
        let mut v = [0, 1, 2, 3].map(|i| mix(high ^ (at as u32).wrapping_mul(4).wrapping_add(i)));
        // No byte sum carries.
        if bytes_are == E4M3_SCALES {
            v = v.map(|word| (word & 0x3F3F_3F3F) + 0x0808_0808);
        } else if bytes_are == E8M0_SCALES {
            v = v.map(|word| (word & 0x0707_0707) + 0x7474_7474);
        }
        to.store_v4(at as usize * 4, v);
        at += step;
    }
}
