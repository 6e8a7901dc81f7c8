//! The one file with racing memory access: the memory of `hogwild` slices.
//!
//! Threads load and store the same elements without any lock (Niu et al. 2011). In Rust, a race between
//! ordinary accesses is undefined behaviour, and no portable vector access is atomic. So the memory is never
//! exposed as a slice, and only two leaf operations touch it, a load and a store: of vectors, or of one
//! element for sparse work (`get`, `set`: plain atomics, which compile to plain moves). Each of them means
//! > one relaxed atomic access per 4-byte lane, in unspecified order,
//!
//! which is literally what the scalar backend below does (`load_scalar`, `store_scalar`). The vector backends
//! are inline assembly that does the same to 4, 8 or 16 lanes with one instruction: it performs a subset of
//! the behaviours of that loop, so it adds no operation that the abstract machine lacks. It is assembly and
//! not intrinsics, because an intrinsic's load is an ordinary load that the compiler may repeat, split or
//! merge. Every buffer has one lane width, 4 bytes, and every lane is aligned; the tail goes through the
//! scalar backend. `cfg(fastps_scalar)`, Miri, loom and other CPUs use only the scalar backend.
//! `crate::kernel::litmus` tests these claims on the CPU at hand.
#![allow(unsafe_code)]

use super::shared::Region;
use crate::base::fault::fault;
use crate::base::isa::{Isa, Kernel, run_scalar};
#[cfg(all(target_arch = "x86_64", not(any(miri, loom, fastps_scalar))))]
use crate::base::isa::{run_avx2, run_avx512};
use crate::base::sync::{Arc, AtomicU32, Ordering};
use std::ptr::NonNull;

/// Float32 values that several threads may load and store at once.
pub(crate) struct RacyBuffer {
    first: NonNull<AtomicU32>,
    len: usize,
    /// Memory that `first` points into.
    _memory: RacyMemory,
}

// SAFETY: `first` points to atomics, which every thread may use, in memory that the buffer owns or keeps
// alive.
unsafe impl Send for RacyBuffer {}
// SAFETY: as above.
unsafe impl Sync for RacyBuffer {}

/// A cache line of lanes. Every thread may change an atomic through a shared reference.
#[repr(C, align(64))]
pub(super) struct Line([AtomicU32; LINE]);

enum RacyMemory {
    Own(#[allow(dead_code)] Vec<Line>),
    /// Memory that other processes may have mapped too.
    Shared(#[allow(dead_code)] Arc<Region>),
}

impl RacyBuffer {
    pub(crate) fn filled(len: usize, value: f32) -> Self {
        let line = || Line(std::array::from_fn(|_| AtomicU32::new(value.to_bits())));
        let lines: Vec<_> = (0..len.div_ceil(16)).map(|_| line()).collect();
        Self { first: first(&lines), len, _memory: RacyMemory::Own(lines) }
    }

    /// `len` values of a region from byte `at` on, with their present contents.
    pub(crate) fn shared(region: Arc<Region>, at: usize, len: usize) -> Self {
        Self { first: first(region.lines(at, len.div_ceil(16))), len, _memory: RacyMemory::Shared(region) }
    }

    /// Bytes of memory for `len` values.
    pub(crate) fn bytes_for(len: usize) -> u64 {
        (size_of::<Line>() * len.div_ceil(16)) as u64
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline(always)]
    fn lane(&self, i: usize) -> &AtomicU32 {
        assert!(i < self.len, "an element outside its buffer");
        // SAFETY: the assertion keeps the lane inside the memory; its atomics are initialised and valid for
        // as long as that memory is.
        unsafe { self.first.add(i).as_ref() }
    }

    /// Loads the elements from `at` on. Every lane is one relaxed load. If `at` is a multiple of 16, no
    /// vector straddles a cache line, which is faster.
    #[inline(always)]
    pub(crate) fn load(&self, isa: Isa, at: usize, out: &mut [f32]) {
        assert!(self.holds(at, out.len()), "a block outside its buffer");
        let base = self.first.as_ptr().cast::<f32>().cast_const().wrapping_add(at);
        // SAFETY: the assertion keeps every vector inside the buffer, which `self` keeps alive; lanes are
        // aligned.
        let done = unsafe { vectors::load(isa, base, out) };
        load_scalar(self, at + done, &mut out[done..]);
    }

    /// Stores the elements from `at` on. Every lane is one relaxed store.
    #[inline(always)]
    pub(crate) fn store(&self, isa: Isa, at: usize, values: &[f32]) {
        assert!(self.holds(at, values.len()), "a block outside its buffer");
        let base = self.first.as_ptr().cast::<f32>().wrapping_add(at);
        // SAFETY: as in `load`; the lanes are atomics, so storing through a shared reference is allowed.
        let done = unsafe { vectors::store(isa, base, values) };
        store_scalar(self, at + done, &values[done..]);
    }

    /// Prefetches elements that will be stored soon; a hint without other effects.
    #[inline(always)]
    pub(crate) fn prefetch(&self, at: usize, len: usize) {
        for at in (at..at + len).step_by(LINE) {
            ask_for(self.first.as_ptr().wrapping_add(at));
        }
    }

    /// Loads one element: one relaxed load, which compiles to a plain one.
    #[inline(always)]
    pub(crate) fn get(&self, i: usize) -> f32 {
        f32::from_bits(self.lane(i).load(Ordering::Relaxed))
    }

    /// Stores one element: one relaxed store, which compiles to a plain one.
    #[inline(always)]
    pub(crate) fn set(&self, i: usize, value: f32) {
        store_lane(self.lane(i), value);
    }

    /// Loads a line; every lane is one relaxed load.
    #[inline(always)]
    pub(crate) fn line(&self, lines: impl Lines, at: usize) -> [f32; LINE] {
        self.run(lines, at)
    }

    /// Stores a line; every lane is one relaxed store.
    #[inline(always)]
    pub(crate) fn set_line(&self, lines: impl Lines, at: usize, line: &[f32; LINE]) {
        self.set_run(lines, at, line);
    }

    /// Loads as many elements as some lines have, at any `at`; every lane is one relaxed load.
    #[inline(always)]
    pub(crate) fn run<const N: usize>(&self, lines: impl Lines, at: usize) -> [f32; N] {
        const { assert!(N.is_multiple_of(LINE)) };
        assert!(self.holds(at, N), "a run outside its buffer");
        let mut run = [0.0; N];
        for (line, at) in run.as_chunks_mut().0.iter_mut().zip((at..).step_by(LINE)) {
            // SAFETY: the assertion keeps each line inside the buffer, which `self` keeps alive; lanes are
            // aligned.
            *line = unsafe { lines.load(self.first.as_ptr().wrapping_add(at)) };
        }
        run
    }

    /// Stores as many elements as some lines have, at any `at`; every lane is one relaxed store.
    #[inline(always)]
    pub(crate) fn set_run<const N: usize>(&self, lines: impl Lines, at: usize, run: &[f32; N]) {
        const { assert!(N.is_multiple_of(LINE)) };
        assert!(self.holds(at, N), "a run outside its buffer");
        for (line, at) in run.as_chunks().0.iter().zip((at..).step_by(LINE)) {
            // SAFETY: as in `run`; the lanes are atomics, so storing through a shared reference is allowed.
            unsafe { lines.store(self.first.as_ptr().wrapping_add(at), line) };
        }
    }

    fn holds(&self, at: usize, len: usize) -> bool {
        at.checked_add(len).is_some_and(|end| end <= self.len)
    }
}

impl std::fmt::Debug for RacyBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RacyBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}

/// The first lane of consecutive lines.
fn first(lines: &[Line]) -> NonNull<AtomicU32> {
    NonNull::from(lines).cast()
}

fn load_scalar(buffer: &RacyBuffer, at: usize, out: &mut [f32]) {
    for (i, x) in out.iter_mut().enumerate() {
        *x = f32::from_bits(buffer.lane(at + i).load(Ordering::Relaxed));
    }
}

fn store_scalar(buffer: &RacyBuffer, at: usize, values: &[f32]) {
    for (i, x) in values.iter().enumerate() {
        store_lane(buffer.lane(at + i), *x);
    }
}

/// One relaxed store.
#[inline(always)]
fn store_lane(lane: &AtomicU32, value: f32) {
    #[cfg(not(loom))]
    if fault("plain_store") {
        // SAFETY: none: a race that ThreadSanitizer and Miri must report.
        unsafe { lane.as_ptr().write(value.to_bits()) };
        return;
    }
    if fault("torn_lane") {
        let half = (lane.load(Ordering::Relaxed) & 0xFFFF_0000) | (value.to_bits() & 0xFFFF);
        lane.store(half, Ordering::Relaxed);
        // Long enough for the half-written lane to leave the core.
        for _ in 0..64 {
            std::hint::spin_loop();
        }
    }
    lane.store(value.to_bits(), Ordering::Relaxed);
}

/// Prefetches a cache line for a store, so that no other core holds it by then.
#[inline(always)]
fn ask_for(p: *const AtomicU32) {
    #[cfg(all(target_arch = "x86_64", not(any(miri, loom, fastps_scalar))))]
    // SAFETY: a hint may name any address; a CPU without this instruction ignores it.
    unsafe {
        std::arch::asm!("prefetchw [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly));
    }
    let _ = p;
}

/// Elements of a cache line.
pub(crate) const LINE: usize = 16;

/// Loads and stores of lines for an instruction set that this CPU has. The choice is made where a loop is
/// compiled, so the loop checks nothing per line.
pub(crate) trait Lines: Copy {
    /// # Safety
    /// `p` is valid for atomic loads of a line's lanes.
    unsafe fn load(self, p: *const AtomicU32) -> [f32; LINE];
    /// # Safety
    /// `p` is valid for atomic stores of a line's lanes.
    unsafe fn store(self, p: *const AtomicU32, values: &[f32; LINE]);
}

/// A loop over lines that is compiled once per instruction set. `run` and all that it calls must be
/// `#[inline(always)]`.
pub(crate) trait LineKernel {
    /// The result of the loop.
    type Out;
    /// As [`Kernel::WIDE`].
    const WIDE: bool = true;
    /// The loop.
    fn run(self, lines: impl Lines) -> Self::Out;
}

struct LineLoop<K, L>(K, L);

impl<K: LineKernel, L: Lines> Kernel for LineLoop<K, L> {
    type Out = K::Out;
    const WIDE: bool = K::WIDE;
    #[inline(always)]
    fn run(self) -> K::Out {
        self.0.run(self.1)
    }
}

/// Runs a loop over lines, compiled for this instruction set. As [`Isa::run`], which would compile each kind
/// of lines for every instruction set.
pub(crate) fn run_lines<K: LineKernel>(isa: Isa, kernel: K) -> K::Out {
    match isa {
        #[cfg(all(target_arch = "x86_64", not(any(miri, loom, fastps_scalar))))]
        // SAFETY: the features were just checked.
        Isa::Avx512 if K::WIDE && isa.is_available() => unsafe {
            run_avx512(LineLoop(kernel, vectors::Avx512Lines(())))
        },
        #[cfg(all(target_arch = "x86_64", not(any(miri, loom, fastps_scalar))))]
        // SAFETY: as above; AVX-512 is reported only where AVX2 is present too.
        Isa::Avx512 | Isa::Avx2 if isa.is_available() => unsafe {
            run_avx2(LineLoop(kernel, vectors::Avx2Lines(())))
        },
        #[cfg(all(target_arch = "aarch64", not(any(miri, loom, fastps_scalar))))]
        Isa::Neon => run_scalar(LineLoop(kernel, vectors::NeonLines(()))),
        _ => run_scalar_lines(kernel),
    }
}

/// Runs a loop over lines, one lane at a time.
pub(crate) fn run_scalar_lines<K: LineKernel>(kernel: K) -> K::Out {
    run_scalar(LineLoop(kernel, ScalarLines))
}

#[derive(Clone, Copy)]
struct ScalarLines;

impl Lines for ScalarLines {
    #[inline(always)]
    unsafe fn load(self, p: *const AtomicU32) -> [f32; LINE] {
        // SAFETY: valid by the caller's promise.
        std::array::from_fn(|k| f32::from_bits(unsafe { &*p.add(k) }.load(Ordering::Relaxed)))
    }

    #[inline(always)]
    unsafe fn store(self, p: *const AtomicU32, values: &[f32; LINE]) {
        for (k, value) in values.iter().enumerate() {
            // SAFETY: valid by the caller's promise.
            store_lane(unsafe { &*p.add(k) }, *value);
        }
    }
}

/// The leaf operations on one vector.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(any(miri, loom, fastps_scalar))))]
macro_rules! leaf {
    ($load:ident, $store:ident, $feature:literal, $vector:ty, $class:ident, $load_text:literal, $store_text:literal) => {
        /// # Safety
        /// `p` is valid for atomic loads of a vector's lanes and aligned to one.
        #[inline]
        #[target_feature(enable = $feature)]
        unsafe fn $load(p: *const f32) -> $vector {
            let vector: $vector;
            // SAFETY: valid by the caller's promise; the meaning is one relaxed load per lane. Not `pure`:
            // another thread may store between two executions.
            unsafe {
                asm!($load_text, v = lateout($class) vector, p = in(reg) p,
                     options(nostack, preserves_flags, readonly));
            }
            vector
        }

        /// # Safety
        /// `p` is valid for atomic stores of a vector's lanes and aligned to one.
        #[inline]
        #[target_feature(enable = $feature)]
        unsafe fn $store(p: *mut f32, vector: $vector) {
            // SAFETY: valid by the caller's promise; the meaning is one relaxed store per lane.
            unsafe {
                asm!($store_text, v = in($class) vector, p = in(reg) p, options(nostack, preserves_flags));
            }
        }
    };
}

/// Loops over whole vectors between racing and private memory; they return how many elements they copied.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(any(miri, loom, fastps_scalar))))]
macro_rules! loops {
    ($load_all:ident, $store_all:ident, $feature:literal, $width:literal, $load:ident, $store:ident, $read:ident,
     $write:ident, $lines:ident) => {
        /// A value of this type exists only where the CPU has the feature.
        #[derive(Clone, Copy)]
        pub(super) struct $lines(pub(super) ());

        impl super::Lines for $lines {
            #[inline(always)]
            unsafe fn load(self, p: *const AtomicU32) -> [f32; super::LINE] {
                let mut line = [0.0; super::LINE];
                // SAFETY: the caller's promise; the CPU has the feature, as `self` shows.
                unsafe { $load_all(p.cast(), &mut line) };
                line
            }

            #[inline(always)]
            unsafe fn store(self, p: *const AtomicU32, values: &[f32; super::LINE]) {
                // SAFETY: as above; the lanes are atomics.
                unsafe { $store_all(p.cast_mut().cast(), values) };
            }
        }

        /// # Safety
        /// `base` is valid for atomic loads of `out.len()` lanes and aligned to one; the CPU has the feature.
        #[target_feature(enable = $feature)]
        unsafe fn $load_all(base: *const f32, out: &mut [f32]) -> usize {
            let chunks = out.chunks_exact_mut($width);
            let done = chunks.len() * $width;
            for (i, chunk) in chunks.enumerate() {
                // SAFETY: inside the lanes of the caller's promise; the chunk is a vector's private elements.
                unsafe { $write(chunk.as_mut_ptr(), $load(base.add(i * $width))) };
            }
            done
        }

        /// # Safety
        /// `base` is valid for atomic stores of `values.len()` lanes and aligned to one; the CPU has the
        /// feature.
        #[target_feature(enable = $feature)]
        unsafe fn $store_all(base: *mut f32, values: &[f32]) -> usize {
            let chunks = values.chunks_exact($width);
            let done = chunks.len() * $width;
            for (i, chunk) in chunks.enumerate() {
                // SAFETY: as above.
                unsafe { $store(base.add(i * $width), $read(chunk.as_ptr())) };
            }
            done
        }
    };
}

#[cfg(all(target_arch = "x86_64", not(any(miri, loom, fastps_scalar))))]
mod vectors {
    use crate::base::isa::Isa;
    use crate::base::sync::AtomicU32;
    use std::arch::asm;
    use std::arch::x86_64::{
        __m256, __m512, _mm256_loadu_ps, _mm256_storeu_ps, _mm512_loadu_ps, _mm512_storeu_ps,
    };

    leaf!(
        load_zmm,
        store_zmm,
        "avx512f",
        __m512,
        zmm_reg,
        "vmovups {v}, zmmword ptr [{p}]",
        "vmovups zmmword ptr [{p}], {v}"
    );
    leaf!(
        load_ymm,
        store_ymm,
        "avx2",
        __m256,
        ymm_reg,
        "vmovups {v}, ymmword ptr [{p}]",
        "vmovups ymmword ptr [{p}], {v}"
    );
    loops!(
        load_avx512,
        store_avx512,
        "avx512f",
        16,
        load_zmm,
        store_zmm,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        Avx512Lines
    );
    loops!(
        load_avx2,
        store_avx2,
        "avx2",
        8,
        load_ymm,
        store_ymm,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        Avx2Lines
    );

    /// # Safety
    /// `base` is valid for atomic loads of `out.len()` lanes and aligned to one.
    #[inline(always)]
    pub(super) unsafe fn load(isa: Isa, base: *const f32, out: &mut [f32]) -> usize {
        match isa {
            // SAFETY: the caller's promise; `is_available` proves the feature.
            Isa::Avx512 if isa.is_available() => unsafe { load_avx512(base, out) },
            // SAFETY: as above.
            Isa::Avx2 if isa.is_available() => unsafe { load_avx2(base, out) },
            _ => 0,
        }
    }

    /// # Safety
    /// `base` is valid for atomic stores of `values.len()` lanes and aligned to one.
    #[inline(always)]
    pub(super) unsafe fn store(isa: Isa, base: *mut f32, values: &[f32]) -> usize {
        match isa {
            // SAFETY: the caller's promise; `is_available` proves the feature.
            Isa::Avx512 if isa.is_available() => unsafe { store_avx512(base, values) },
            // SAFETY: as above.
            Isa::Avx2 if isa.is_available() => unsafe { store_avx2(base, values) },
            _ => 0,
        }
    }
}

#[cfg(all(target_arch = "aarch64", not(any(miri, loom, fastps_scalar))))]
mod vectors {
    use crate::base::isa::Isa;
    use crate::base::sync::AtomicU32;
    use std::arch::aarch64::{float32x4_t, vld1q_f32, vst1q_f32};
    use std::arch::asm;

    // LD1 and ST1 access memory element by element, and each access is atomic if its element is aligned, at
    // any address of the vector.
    leaf!(load_q, store_q, "neon", float32x4_t, vreg, "ld1 {{{v:v}.4s}}, [{p}]", "st1 {{{v:v}.4s}}, [{p}]");
    loops!(load_neon, store_neon, "neon", 4, load_q, store_q, vld1q_f32, vst1q_f32, NeonLines);

    /// # Safety
    /// `base` is valid for atomic loads of `out.len()` lanes and aligned to one.
    #[inline(always)]
    pub(super) unsafe fn load(isa: Isa, base: *const f32, out: &mut [f32]) -> usize {
        match isa {
            // SAFETY: the caller's promise; every AArch64 CPU of this target has NEON.
            Isa::Neon => unsafe { load_neon(base, out) },
            _ => 0,
        }
    }

    /// # Safety
    /// `base` is valid for atomic stores of `values.len()` lanes and aligned to one.
    #[inline(always)]
    pub(super) unsafe fn store(isa: Isa, base: *mut f32, values: &[f32]) -> usize {
        match isa {
            // SAFETY: the caller's promise; every AArch64 CPU of this target has NEON.
            Isa::Neon => unsafe { store_neon(base, values) },
            _ => 0,
        }
    }
}

/// No vector instructions: the scalar backend handles every lane.
#[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri, loom, fastps_scalar))]
mod vectors {
    use crate::base::isa::Isa;

    /// # Safety
    /// None is needed: it accesses no memory.
    pub(super) unsafe fn load(_isa: Isa, _base: *const f32, _out: &mut [f32]) -> usize {
        0
    }

    /// # Safety
    /// None is needed: it accesses no memory.
    pub(super) unsafe fn store(_isa: Isa, _base: *mut f32, _values: &[f32]) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn isas() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// Lengths around every vector width, line and block; only a few where each access is interpreted.
    fn lengths() -> Vec<usize> {
        if cfg!(miri) {
            return vec![0, 1, 15, 16, 17, 33, 130];
        }
        (0..=257).chain([1023, 1024, 1025, 4097]).collect()
    }

    fn values(n: usize) -> Vec<f32> {
        (1..=n as u32).map(|i| f32::from_bits(0x7FC0_0001_u32.wrapping_mul(i))).collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn every_backend_stores_and_loads_the_same_bits_at_every_place() {
        for (isa, n) in isas().flat_map(|isa| lengths().into_iter().map(move |n| (isa, n))) {
            let values = values(n);
            // Every offset in a line, for the racing memory and for the private memory.
            for at in 0..if n <= 257 { 17 } else { 2 } {
                let buffer = RacyBuffer::filled(n + 33, 1.0);
                buffer.store(isa, at, &values);
                for reader in isas() {
                    let mut out = vec![0.0; n + at];
                    buffer.load(reader, at, &mut out[at..]);
                    assert_eq!(bits(&out[at..]), bits(&values), "{isa:?} {reader:?} {n} at {at}");
                    let mut around = vec![0.0; n + 33];
                    buffer.load(reader, 0, &mut around);
                    around.drain(at..at + n);
                    assert!(around.iter().all(|x| *x == 1.0), "{isa:?} stores beside {n} at {at}");
                }
            }
        }
    }

    /// Adds one to every element of a buffer, line by line.
    struct Increment<'a>(&'a RacyBuffer);

    impl LineKernel for Increment<'_> {
        type Out = ();
        #[inline(always)]
        fn run(self, lines: impl Lines) {
            for at in (0..self.0.len()).step_by(LINE) {
                self.0.set_line(lines, at, &self.0.line(lines, at).map(|x| x + 1.0));
            }
        }
    }

    #[test]
    fn every_backend_has_the_same_lines() {
        for isa in isas() {
            let values: Vec<f32> = (0..64).map(|k| k as f32).collect();
            let buffer = RacyBuffer::filled(64, 0.0);
            buffer.store(isa, 0, &values);
            run_lines(isa, Increment(&buffer));
            let mut out = vec![0.0; 64];
            buffer.load(isa, 0, &mut out);
            assert!(out.iter().zip(&values).all(|(x, y)| *x == y + 1.0), "{isa:?}: {out:?}");
        }
    }

    /// Stores a run at an offset, and loads it.
    struct Copied<'a>(&'a RacyBuffer, usize, &'a [f32; 64]);

    impl LineKernel for Copied<'_> {
        type Out = [f32; 64];
        #[inline(always)]
        fn run(self, lines: impl Lines) -> [f32; 64] {
            self.0.set_run(lines, self.1, self.2);
            self.0.run(lines, self.1)
        }
    }

    #[test]
    fn runs_at_any_offset_leave_their_neighbours() {
        let values = std::array::from_fn(|k| k as f32 - 7.0);
        for isa in isas() {
            for at in 0..17 {
                let buffer = RacyBuffer::filled(64 + 17, 1.0);
                assert_eq!(run_lines(isa, Copied(&buffer, at, &values)), values, "{isa:?} at {at}");
                let mut all = vec![0.0; 64 + 17];
                buffer.load(Isa::Scalar, 0, &mut all);
                assert!(all.drain(at..at + 64).eq(values), "{isa:?} at {at}");
                assert!(all.iter().all(|x| *x == 1.0), "{isa:?} stores beside {at}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "a run outside its buffer")]
    fn a_run_outside_is_refused() {
        run_lines(Isa::best(), Increment(&RacyBuffer::filled(17, 0.0)));
    }

    #[test]
    #[should_panic(expected = "outside its buffer")]
    fn a_block_outside_is_refused() {
        RacyBuffer::filled(16, 0.0).load(Isa::best(), 1, &mut [0.0; 16]);
    }
}
