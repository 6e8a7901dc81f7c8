//! The one file with racing memory access: the memory of `hogwild` slices.
//!
//! Threads load and store the same elements without any lock (Niu et al. 2011). In Rust a race between ordinary
//! accesses is undefined behaviour, and no portable vector access is atomic. So the memory is never exposed as a
//! slice, and exactly two leaf operations touch it, a vector load and a vector store. Their meaning is
//!
//! > one relaxed atomic access per 4-byte lane, in unspecified order,
//!
//! which is what the scalar backend below does literally (`load_scalar`, `store_scalar`). The vector backends are
//! inline assembly that does the same to 8 or 16 aligned lanes with one instruction: it performs a subset of the
//! behaviours of that loop, so it adds no operation that the abstract machine lacks. Assembly rather than intrinsics,
//! because an intrinsic's load is an ordinary one that the compiler may repeat, split or merge. The buffers are
//! aligned to 64 bytes and only aligned vectors are used; a tail goes through the scalar backend. One lane width per
//! buffer: 4 bytes, never mixed. `cfg(fastps_scalar)`, Miri and all CPUs but x86-64 use the scalar backend alone.
#![allow(unsafe_code)]

use crate::isa::Isa;
use crate::sync::{AtomicU32, Ordering};

/// Float32 values that several threads load and store at once.
pub(crate) struct RacyBuffer {
    lanes: Box<[Line]>,
    len: usize,
}

/// A cache line of lanes; atomics may be changed through a shared reference, by every thread.
#[repr(C, align(64))]
struct Line([AtomicU32; 16]);

impl RacyBuffer {
    pub(crate) fn filled(len: usize, value: f32) -> Self {
        let lines = len.div_ceil(16);
        let line = || Line(std::array::from_fn(|_| AtomicU32::new(value.to_bits())));
        Self { lanes: (0..lines).map(|_| line()).collect(), len }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn lane(&self, i: usize) -> &AtomicU32 {
        &self.lanes[i / 16].0[i % 16]
    }

    /// Loads the elements from `at`, a multiple of 16. Every lane is one relaxed load.
    pub(crate) fn load(&self, isa: Isa, at: usize, out: &mut [f32]) {
        let done = self.load_vectors(isa, at, out);
        load_scalar(self, at + done, &mut out[done..]);
    }

    /// Stores the elements from `at`, a multiple of 16. Every lane is one relaxed store.
    pub(crate) fn store(&self, isa: Isa, at: usize, values: &[f32]) {
        let done = self.store_vectors(isa, at, values);
        store_scalar(self, at + done, &values[done..]);
    }

    #[cfg(not(all(target_arch = "x86_64", not(miri), not(fastps_scalar))))]
    fn load_vectors(&self, _isa: Isa, _at: usize, _out: &mut [f32]) -> usize {
        0
    }

    #[cfg(not(all(target_arch = "x86_64", not(miri), not(fastps_scalar))))]
    fn store_vectors(&self, _isa: Isa, _at: usize, _values: &[f32]) -> usize {
        0
    }

    #[cfg(all(target_arch = "x86_64", not(miri), not(fastps_scalar)))]
    fn load_vectors(&self, isa: Isa, at: usize, out: &mut [f32]) -> usize {
        assert!(at.is_multiple_of(16) && at + out.len() <= self.len, "a block outside its buffer");
        let base = self.lanes.as_ptr().cast::<f32>().wrapping_add(at);
        match isa {
            // SAFETY: the assertion keeps every vector inside the buffer, which `self` keeps alive; `base` is aligned
            // to 64 bytes because `at` is a multiple of 16 and a `Line` is aligned; `is_available` proves the feature.
            Isa::Avx512 if isa.is_available() => unsafe { x86_64::load_avx512(base, out) },
            // SAFETY: as above.
            Isa::Avx2 if isa.is_available() => unsafe { x86_64::load_avx2(base, out) },
            _ => 0,
        }
    }

    #[cfg(all(target_arch = "x86_64", not(miri), not(fastps_scalar)))]
    fn store_vectors(&self, isa: Isa, at: usize, values: &[f32]) -> usize {
        assert!(at.is_multiple_of(16) && at + values.len() <= self.len, "a block outside its buffer");
        let base = self.lanes.as_ptr().cast::<f32>().cast_mut().wrapping_add(at);
        match isa {
            // SAFETY: as in `load_vectors`; the lanes are atomics, so storing through a shared reference is allowed.
            Isa::Avx512 if isa.is_available() => unsafe { x86_64::store_avx512(base, values) },
            // SAFETY: as above.
            Isa::Avx2 if isa.is_available() => unsafe { x86_64::store_avx2(base, values) },
            _ => 0,
        }
    }
}

impl std::fmt::Debug for RacyBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RacyBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}

fn load_scalar(buffer: &RacyBuffer, at: usize, out: &mut [f32]) {
    for (i, x) in out.iter_mut().enumerate() {
        *x = f32::from_bits(buffer.lane(at + i).load(Ordering::Relaxed));
    }
}

fn store_scalar(buffer: &RacyBuffer, at: usize, values: &[f32]) {
    for (i, x) in values.iter().enumerate() {
        buffer.lane(at + i).store(x.to_bits(), Ordering::Relaxed);
    }
}

/// The leaf operations. Each function copies whole vectors and returns how many elements it copied.
#[cfg(all(target_arch = "x86_64", not(miri), not(fastps_scalar)))]
mod x86_64 {
    use std::arch::asm;
    use std::arch::x86_64::{
        __m256, __m512, _mm256_loadu_ps, _mm256_storeu_ps, _mm512_loadu_ps, _mm512_storeu_ps,
    };

    macro_rules! leaf {
        ($load:ident, $store:ident, $feature:literal, $vector:ty, $class:ident, $width:literal, $mov_load:literal,
         $mov_store:literal, $read:ident, $write:ident) => {
            /// # Safety
            /// `base` is aligned to a vector and valid for atomic loads of `out.len()` elements; the CPU has the
            /// feature.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $load(base: *const f32, out: &mut [f32]) -> usize {
                let vectors = out.chunks_exact_mut($width);
                let done = vectors.len() * $width;
                for (i, chunk) in vectors.enumerate() {
                    let vector: $vector;
                    // SAFETY: inside the buffer by the caller's promise; the meaning is one relaxed load per lane.
                    // Not `pure`: another thread may store between two executions.
                    unsafe {
                        asm!($mov_load, v = lateout($class) vector, p = in(reg) base.add(i * $width),
                             options(nostack, preserves_flags, readonly));
                    }
                    // SAFETY: the chunk has exactly one vector's elements, and no alignment is asked for.
                    unsafe { $write(chunk.as_mut_ptr(), vector) };
                }
                done
            }

            /// # Safety
            /// `base` is aligned to a vector and valid for atomic stores of `values.len()` elements; the CPU has the
            /// feature.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $store(base: *mut f32, values: &[f32]) -> usize {
                let vectors = values.chunks_exact($width);
                let done = vectors.len() * $width;
                for (i, chunk) in vectors.enumerate() {
                    // SAFETY: the chunk has exactly one vector's elements, and no alignment is asked for.
                    let vector = unsafe { $read(chunk.as_ptr()) };
                    // SAFETY: inside the buffer by the caller's promise; the meaning is one relaxed store per lane.
                    unsafe {
                        asm!($mov_store, v = in($class) vector, p = in(reg) base.add(i * $width),
                             options(nostack, preserves_flags));
                    }
                }
                done
            }
        };
    }

    leaf!(
        load_avx512,
        store_avx512,
        "avx512f",
        __m512,
        zmm_reg,
        16,
        "vmovaps {v}, zmmword ptr [{p}]",
        "vmovaps zmmword ptr [{p}], {v}",
        _mm512_loadu_ps,
        _mm512_storeu_ps
    );
    leaf!(
        load_avx2,
        store_avx2,
        "avx2",
        __m256,
        ymm_reg,
        8,
        "vmovaps {v}, ymmword ptr [{p}]",
        "vmovaps ymmword ptr [{p}], {v}",
        _mm256_loadu_ps,
        _mm256_storeu_ps
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_backend_stores_and_loads_the_same_bits() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for n in (0..=130).chain([1023, 1024, 1025, 4097]) {
                let values: Vec<f32> =
                    (0..n).map(|i| f32::from_bits(0x7FC0_0001_u32.wrapping_mul(i as u32 + 1))).collect();
                let buffer = RacyBuffer::filled(n, 1.0);
                buffer.store(isa, 0, &values);
                for reader in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                    let mut out = vec![0.0; n];
                    buffer.load(reader, 0, &mut out);
                    assert!(out.iter().zip(&values).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa:?} {n}");
                }
            }
        }
    }

    #[test]
    fn racing_threads_never_tear_a_value() {
        let buffer = RacyBuffer::filled(4096, 1.0);
        let isa = Isa::best();
        std::thread::scope(|scope| {
            for value in [1.0_f32, -2.5e30] {
                let buffer = &buffer;
                scope.spawn(move || (0..200).for_each(|_| buffer.store(isa, 0, &vec![value; 4096])));
            }
            let mut out = vec![0.0; 4096];
            for _ in 0..200 {
                buffer.load(isa, 0, &mut out);
                assert!(out.iter().all(|x| *x == 1.0 || *x == -2.5e30));
            }
        });
    }
}
