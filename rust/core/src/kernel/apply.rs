//! The fused loop: decode, step, store. This is the only file that combines storage, codecs and optimizers.
//! It is compiled once per (storage, codec, optimizer, instruction set), except that racing memory has one
//! loop for all codecs but float32. A body with separately stored elements is decoded inside the step's own
//! loop, other bodies block by block; nothing is ever decoded into a temporary the size of the tensor.

use crate::base::block::{AlignedBlock, BLOCK, Block, Lane, blocks};
use crate::base::isa::{Isa, Kernel};
use crate::base::sync::Ordering;
use crate::kernel::codec::{Body, CodecId, Float32Body, WithBody, float64_lanes};
use crate::kernel::ema::Following;
use crate::kernel::optim::{MAX_SLOTS, Rule, SgdRule, SgdStep, SparseRule, Step, WithRule};
use crate::kernel::rounding::Rounder;
use crate::kernel::rows::{Indices, RowLayout, Runs};
use crate::memory::{Buffer, Counts, LineKernel, Lines, RacyBuffer, run_lines, run_scalar_lines};
use std::ops::Range;

/// Memory of a slice, before the instruction set is chosen.
pub(crate) trait Memory {
    /// Does work on the memory, compiled for this instruction set.
    fn run(&mut self, isa: Isa, work: impl Work);
}

/// A loop over the elements of a slice. `run` and all that it calls must be `#[inline(always)]`.
pub(crate) trait Work {
    /// As [`Kernel::WIDE`].
    const WIDE: bool = true;
    fn run<S: Storage>(self, storage: S);
}

/// Parameters and optimizer state of one slice, as a loop compiled for an instruction set accesses them.
pub(crate) trait Storage {
    /// A buffer for elements that are decoded together; their number divides [`BLOCK`].
    type Decoded: AsMut<[f32]>;
    const DECODED: Self::Decoded;
    /// Set if the buffer is so short that it stays in registers.
    const DECODES_IN_REGISTERS: bool;
    fn len(&self) -> usize;
    /// The elements in the order in which a push visits them: racing pushes begin at different blocks. Each
    /// range begins at a block, or is empty.
    type Ranges: Iterator<Item = Range<usize>>;
    fn ranges(&self) -> Self::Ranges;
    /// The most elements that a push steps before it calls [`Storage::updated`].
    fn part_len(&self) -> usize {
        usize::MAX
    }
    /// Does what follows the step of these elements.
    fn updated(&mut self, _range: Range<usize>) {}
    /// Steps `g.len()` elements from `at` on. This is a method and not a closure because it must be inlined
    /// into the loop that carries the target features.
    fn update<R: Step, G: Lane>(&mut self, at: usize, rule: R, g: &[G]);
}

/// Plain memory under the slice's lock, updated in place.
pub(crate) struct Exact<'a> {
    pub(crate) params: &'a mut [f32],
    /// The element of the slice that `params` begins with.
    pub(crate) first: usize,
    /// The state of the optimizer, without the average.
    pub(crate) state: &'a mut [Buffer],
    /// The average of the values, if the step moves it.
    pub(crate) average: Option<Following<'a>>,
}

impl<'a> Exact<'a> {
    /// Values without state or average.
    pub(crate) fn values(params: &'a mut [f32]) -> Self {
        Self { params, first: 0, state: &mut [], average: None }
    }
}

impl Memory for Exact<'_> {
    fn run(&mut self, isa: Isa, work: impl Work) {
        let average = self.average.as_mut().map(Following::reborrow);
        let memory = Exact { params: self.params, first: self.first, state: self.state, average };
        run(isa, Locked { memory, work });
    }
}

/// A loop over plain memory.
struct Locked<'a, W> {
    memory: Exact<'a>,
    work: W,
}

impl<W: Work> Kernel for Locked<'_, W> {
    type Out = ();
    const WIDE: bool = W::WIDE;

    #[inline(always)]
    fn run(self) {
        self.work.run(self.memory);
    }
}

impl Storage for Exact<'_> {
    type Decoded = Run;
    const DECODED: Run = Run::ZERO;
    const DECODES_IN_REGISTERS: bool = true;
    type Ranges = std::iter::Once<Range<usize>>;

    #[inline(always)]
    fn len(&self) -> usize {
        self.params.len()
    }

    #[inline(always)]
    fn ranges(&self) -> Self::Ranges {
        std::iter::once(self.first..self.first + self.params.len())
    }

    /// Short enough for the values to be in the cache when the average follows.
    #[inline(always)]
    fn part_len(&self) -> usize {
        if self.average.is_some() { BLOCK } else { usize::MAX }
    }

    #[inline(always)]
    fn updated(&mut self, range: Range<usize>) {
        if let Some(average) = &mut self.average {
            average.follow(range.clone(), &self.params[range.start - self.first..range.end - self.first]);
        }
    }

    #[inline(always)]
    fn update<R: Step, G: Lane>(&mut self, at: usize, rule: R, g: &[G]) {
        let (len, from) = (g.len(), at - self.first);
        let used = self.state.len().min(MAX_SLOTS);
        let mut slots: [&mut [f32]; MAX_SLOTS] = Default::default();
        for (slot, buffer) in slots.iter_mut().zip(self.state.iter_mut()) {
            *slot = &mut buffer.values_mut::<f32>()[at..at + len];
        }
        rule.step(&mut self.params[from..from + len], &mut slots[..used], g);
    }
}

/// Values of bfloat16 under the slice's lock. A step widens some of them, steps these as float32 and rounds them,
/// so that no optimizer, codec or instruction set has a second kernel.
pub(crate) struct Rounded<'a> {
    pub(crate) params: &'a mut [u16],
    /// The state of the optimizer, without the average.
    pub(crate) state: &'a mut [Buffer],
    /// The average of the values, if the step moves it: it follows the rounded ones.
    pub(crate) average: Option<Following<'a>>,
    pub(crate) rounder: Rounder,
}

/// Elements that are widened at a time: few enough for the first-level cache, and enough for a step to be long
/// beside the choice of its kernel.
const WIDENED: usize = 4 * BLOCK;

impl Rounded<'_> {
    /// Steps at most [`WIDENED`] elements.
    fn step(&mut self, range: Range<usize>, step: impl FnOnce(Exact<'_>)) {
        let mut widened = AlignedBlock::<WIDENED>::ZERO;
        let values = &mut widened.0[..range.len()];
        let params = &mut self.params[range.clone()];
        self.rounder.widen(params, values);
        step(Exact { params: values, first: range.start, state: self.state, average: None });
        self.rounder.round(range.start, values, params);
        if let Some(average) = &mut self.average {
            self.rounder.widen(params, values);
            average.follow(range, values);
        }
    }
}

/// Elements of a run: every codec's smallest block. A run stays in registers, where they suffice, between
/// decoder and step, and in racing memory between load and store.
const RUN: usize = 64;
type Run = AlignedBlock<RUN>;

/// Racing memory, which many pushes update at a time.
#[derive(Clone, Copy)]
pub(crate) struct Hogwild<'a> {
    pub(crate) params: &'a RacyBuffer,
    pub(crate) state: &'a [RacyBuffer],
    pub(crate) first_block: usize,
    /// Counts how many updates of the first [`RUN`] elements racing updates overwrite.
    pub(crate) probe: Option<&'a Counts>,
}

impl Memory for Hogwild<'_> {
    fn run(&mut self, isa: Isa, work: impl Work) {
        let work = Racing { isa, memory: *self, work };
        if cfg!(test) { run_scalar_lines(work) } else { run_lines(isa, work) }
    }
}

/// A loop over racing memory.
struct Racing<'a, W> {
    isa: Isa,
    memory: Hogwild<'a>,
    work: W,
}

impl<W: Work> LineKernel for Racing<'_, W> {
    type Out = ();
    const WIDE: bool = W::WIDE;

    #[inline(always)]
    fn run(self, lines: impl Lines) {
        let Self { isa, memory, work } = self;
        work.run(HogwildLines { isa, memory, lines });
    }
}

/// Racing memory, a run at a time: loaded, stepped, and stored back, so that few lanes are between load and
/// store, where another push would overwrite them.
struct HogwildLines<'a, L> {
    isa: Isa,
    memory: Hogwild<'a>,
    lines: L,
}

impl<L: Lines> HogwildLines<'_, L> {
    /// Steps a run.
    #[inline(always)]
    fn step_run<R: Step, G: Lane>(&self, at: usize, rule: R, g: &[G]) {
        let Self { memory, lines, .. } = *self;
        let used = used_slots::<R>(memory.state);
        let probe = self.probe(at);
        let (mut params, mut state) = (Run::ZERO, [Run::ZERO; MAX_SLOTS]);
        params.0 = memory.params.run(lines, at);
        for (run, buffer) in state.iter_mut().zip(memory.state).take(R::SLOTS) {
            run.0 = buffer.run(lines, at);
        }
        let mut slots = state.each_mut().map(|run| &mut run.0[..]);
        rule.step(&mut params.0, &mut slots[..used], g);
        memory.params.set_run(lines, at, &params.0);
        count(probe);
        for (run, buffer) in state.iter().zip(memory.state).take(R::SLOTS) {
            buffer.set_run(lines, at, &run.0);
        }
    }

    /// Steps less than a run.
    #[inline(always)]
    fn step_rest<R: Step, G: Lane>(&self, at: usize, rule: R, g: &[G]) {
        let Self { isa, memory, .. } = *self;
        let (len, used) = (g.len(), used_slots::<R>(memory.state));
        let probe = self.probe(at);
        let (mut params, mut state) = (Run::ZERO, [Run::ZERO; MAX_SLOTS]);
        let params = &mut params.0[..len];
        memory.params.load(isa, at, params);
        let mut slots = state.each_mut().map(|run| &mut run.0[..len]);
        for (slot, buffer) in slots.iter_mut().zip(memory.state).take(R::SLOTS) {
            buffer.load(isa, at, slot);
        }
        rule.step(params, &mut slots[..used], g);
        memory.params.store(isa, at, params);
        count(probe);
        for (slot, buffer) in slots.iter().zip(memory.state).take(R::SLOTS) {
            buffer.store(isa, at, slot);
        }
    }

    /// At the start of an update of the elements at `at`: the probe and its present count, if this update is
    /// probed.
    #[inline(always)]
    fn probe(&self, at: usize) -> Option<(&Counts, u64)> {
        let counts = self.memory.probe.filter(|_| at == 0)?;
        Some((counts, counts.kept().load(Ordering::Relaxed)))
    }
}

/// Number of state slots that a step of the rule gets.
#[inline(always)]
fn used_slots<R: Step>(state: &[RacyBuffer]) -> usize {
    const { assert!(R::SLOTS <= MAX_SLOTS) };
    debug_assert!(state.len() <= R::SLOTS, "a rule whose SLOTS is too small");
    state.len().min(R::SLOTS)
}

/// Counts a probed update. Loaded and stored as the values are, so a race that overwrites the values also
/// overwrites this count.
#[inline(always)]
fn count(probe: Option<(&Counts, u64)>) {
    if let Some((counts, kept)) = probe {
        counts.kept().store(kept.wrapping_add(1), Ordering::Relaxed);
        counts.probed().fetch_add(1, Ordering::Relaxed);
    }
}

impl<L: Lines> Storage for HogwildLines<'_, L> {
    type Decoded = Block;
    const DECODED: Block = Block::ZERO;
    const DECODES_IN_REGISTERS: bool = false;
    type Ranges = std::array::IntoIter<Range<usize>, 2>;

    #[inline(always)]
    fn len(&self) -> usize {
        self.memory.params.len()
    }

    #[inline(always)]
    fn ranges(&self) -> Self::Ranges {
        let (n, first) = (self.len(), (self.memory.first_block * BLOCK).min(self.len()));
        [first..n, 0..first].into_iter()
    }

    #[inline(always)]
    fn update<R: Step, G: Lane>(&mut self, at: usize, rule: R, g: &[G]) {
        let runs = g.chunks_exact(RUN);
        let (whole, rest) = (RUN * runs.len(), runs.remainder());
        for (g, at) in runs.zip((at..).step_by(RUN)) {
            self.step_run(at, rule, g);
        }
        if !rest.is_empty() {
            self.step_rest(at + whole, rule, rest);
        }
    }
}

/// Applies one validated body to one slice.
#[inline(always)]
pub(crate) fn apply(isa: Isa, memory: Exact<'_>, codec: CodecId, body: &[u8], scale: f32, rule: Rule) {
    let n = memory.params.len();
    codec.select(body, n, Encoded { isa, memory, scale, rule });
}

/// Applies one validated body to one slice of bfloat16.
pub(crate) fn apply_rounded(
    isa: Isa,
    mut memory: Rounded<'_>,
    codec: CodecId,
    body: &[u8],
    scale: f32,
    rule: Rule,
) {
    let n = memory.params.len();
    for at in (0..n).step_by(WIDENED) {
        memory.step(at..n.min(at + WIDENED), |memory| {
            codec.select(body, n, Encoded { isa, memory, scale, rule });
        });
    }
}

/// A dense push, before its codec is known at compile time.
struct Encoded<M> {
    isa: Isa,
    memory: M,
    scale: f32,
    rule: Rule,
}

impl<M: Memory> WithBody for Encoded<M> {
    type Out = ();
    #[inline(always)]
    fn run_with(self, body: impl Body) {
        let Self { isa, memory, scale, rule } = self;
        with_body(isa, memory, body, scale, rule);
    }
}

/// Applies one validated body of float64 to a float64 slice under the slice's lock.
pub(crate) fn apply_float64(
    isa: Isa,
    params: &mut [f64],
    state: &mut [Buffer],
    body: &[u8],
    scale: f64,
    step: SgdStep<f64>,
) {
    match step {
        SgdStep::Plain(rule) => run(isa, Float64Step { params, state, body, scale, rule }),
        SgdStep::Momentum(rule) => run(isa, Float64Step { params, state, body, scale, rule }),
    }
}

struct Float64Step<'a, R> {
    params: &'a mut [f64],
    state: &'a mut [Buffer],
    body: &'a [u8],
    scale: f64,
    rule: R,
}

impl<R: Step<f64>> Kernel for Float64Step<'_, R> {
    type Out = ();
    const WIDE: bool = false;

    #[inline(always)]
    fn run(self) {
        let Self { params, state, body, scale, rule } = self;
        let g = float64_lanes(body);
        let mut slots: [&mut [f64]; MAX_SLOTS] = Default::default();
        let used = state.len().min(MAX_SLOTS);
        for (slot, buffer) in slots.iter_mut().zip(state) {
            *slot = buffer.values_mut();
        }
        if scale == 1.0 {
            return rule.step(params, &mut slots[..used], g);
        }
        let mut scaled = [0.0; RUN];
        for (g, at) in g.chunks(RUN).zip((0..).step_by(RUN)) {
            for (scaled, g) in scaled.iter_mut().zip(g) {
                *scaled = f64::from_le_bytes(*g) * scale;
            }
            let mut part: [&mut [f64]; MAX_SLOTS] = Default::default();
            for (part, slot) in part.iter_mut().zip(&mut slots[..used]) {
                *part = &mut slot[at..at + g.len()];
            }
            rule.step(&mut params[at..at + g.len()], &mut part[..used], &scaled[..g.len()]);
        }
    }
}

/// Adds one validated body to `to`; each sum is rounded once.
pub(crate) fn add(isa: Isa, to: &mut [f32], codec: CodecId, body: &[u8], scale: f32) {
    apply(isa, Exact::values(to), codec, body, scale, Rule::Sgd(SgdRule::SUM));
}

/// Applies one validated body to racing memory. The step copies runs anyway, so a body's decoder need not be
/// part of the loop.
#[inline(always)]
pub(crate) fn apply_racing(
    isa: Isa,
    memory: Hogwild<'_>,
    codec: CodecId,
    body: &[u8],
    scale: f32,
    rule: Rule,
) {
    let n = memory.params.len();
    match codec {
        CodecId::Float32 => with_body(isa, memory, Float32Body::new(body, n), scale, rule),
        _ => with_body(isa, memory, AnyBody { isa, codec, body, n }, scale, rule),
    }
}

/// A body whose codec is known at run time and not at compile time.
#[derive(Clone, Copy)]
struct AnyBody<'a> {
    isa: Isa,
    codec: CodecId,
    body: &'a [u8],
    n: usize,
}

impl Body for AnyBody<'_> {
    type Lane = f32;

    #[inline(always)]
    fn lanes(&self, _range: Range<usize>) -> Option<&[f32]> {
        None
    }

    #[inline(always)]
    fn decode(&self, at: usize, out: &mut [f32]) {
        self.codec.decode_block(self.isa, self.body, self.n, at, out);
    }
}

#[inline(always)]
fn with_body(isa: Isa, memory: impl Memory, body: impl Body, scale: f32, rule: Rule) {
    rule.select(DensePush { isa, memory, body, scale });
}

/// A dense push, before its rule is known at compile time.
struct DensePush<M, B> {
    isa: Isa,
    memory: M,
    body: B,
    scale: f32,
}

impl<M: Memory, B: Body> WithRule for DensePush<M, B> {
    #[inline(always)]
    fn run_with(self, rule: impl Step) {
        let Self { isa, mut memory, body, scale } = self;
        memory.run(isa, Fused { body, scale, rule });
    }
}

/// Unit tests run only the scalar loops: compiling all loops takes minutes, and `tests/api/isa.rs` tests
/// them.
#[inline(always)]
fn run(isa: Isa, kernel: impl Kernel<Out = ()>) {
    if cfg!(test) { kernel.run() } else { isa.run(kernel) }
}

struct Fused<B, R> {
    body: B,
    scale: f32,
    rule: R,
}

impl<B: Body, R: Step> Work for Fused<B, R> {
    const WIDE: bool = B::WIDE;

    #[inline(always)]
    fn run<S: Storage>(self, mut storage: S) {
        let lanes = self.scale == 1.0 && self.body.lanes(0..storage.len()).is_some();
        // A loop and not two calls: each call would copy the step into each of some hundred kernels.
        for Range { mut start, end } in storage.ranges() {
            while start < end {
                let part = start..end.min(start.saturating_add(storage.part_len()));
                if lanes {
                    self.lanes(&mut storage, part.clone());
                } else {
                    self.runs(&mut storage, part.clone());
                }
                start = part.end;
                storage.updated(part);
            }
        }
    }
}

impl<B: Body, R: Step> Fused<B, R> {
    /// Steps a body whose elements are stored separately.
    #[inline(always)]
    fn lanes<S: Storage>(&self, storage: &mut S, range: Range<usize>) {
        if let Some(lanes) = self.body.lanes(range.clone()) {
            storage.update(range.start, self.rule, lanes);
        }
    }

    /// Steps any body, some elements at a time.
    #[inline(always)]
    fn runs<S: Storage>(&self, storage: &mut S, Range { start: mut at, end }: Range<usize>) {
        let mut decoded = S::DECODED;
        let g = decoded.as_mut();
        if !S::DECODES_IN_REGISTERS {
            while at < end {
                let len = g.len().min(end - at);
                self.run_at(storage, at, &mut g[..len]);
                at += len;
            }
            return;
        }
        // Whole runs are a separate loop, so that their length is a compile-time constant.
        while end - at >= g.len() {
            self.run_at(storage, at, g);
            at += g.len();
        }
        if at < end {
            // A separate buffer: slicing `decoded` would force it into memory.
            let mut rest = S::DECODED;
            self.run_at(storage, at, &mut rest.as_mut()[..end - at]);
        }
    }

    #[inline(always)]
    fn run_at(&self, storage: &mut impl Storage, at: usize, g: &mut [f32]) {
        self.body.decode(at, g);
        if self.scale != 1.0 {
            for x in g.iter_mut() {
                *x *= self.scale;
            }
        }
        storage.update(at, self.rule, &*g);
    }
}

/// A sparse push on one slice.
#[derive(Clone, Copy)]
pub(crate) struct Touch<'a> {
    pub(crate) layout: RowLayout,
    pub(crate) indices: Indices<'a>,
    pub(crate) codec: CodecId,
    pub(crate) body: &'a [u8],
    /// Elements in the body.
    pub(crate) elements: usize,
    pub(crate) scale: f32,
}

impl Touch<'_> {
    /// Decodes the elements from `at` on, times the scale.
    fn decode<'g>(&self, isa: Isa, at: usize, g: &'g mut [f32]) -> &'g [f32] {
        self.codec.decode_block(isa, self.body, self.elements, at, g);
        if self.scale != 1.0 {
            for x in g.iter_mut() {
                *x *= self.scale;
            }
        }
        g
    }
}

/// Applies one validated sparse body to its rows of one slice. Sparse values are few, so they are decoded
/// block by block, and one loop per rule steps them for all codecs.
pub(crate) fn apply_rows(isa: Isa, mut memory: impl Memory, touch: Touch<'_>, rule: SparseRule) {
    let mut runs = touch.layout.runs(touch.indices);
    let mut block = Block::ZERO;
    for (at, len) in blocks(touch.elements) {
        let g = touch.decode(isa, at, &mut block.0[..len]);
        rule.select(RowsBlock { isa, memory: &mut memory, runs: &mut runs, g });
    }
}

/// Applies one validated sparse body to its rows of one slice of bfloat16.
pub(crate) fn apply_rows_rounded(isa: Isa, mut memory: Rounded<'_>, touch: Touch<'_>, rule: SparseRule) {
    let mut runs = touch.layout.runs(touch.indices);
    let mut block = Block::ZERO;
    for (at, len) in blocks(touch.elements) {
        let mut g = touch.decode(isa, at, &mut block.0[..len]);
        while let Some(run) = runs.next_of(g.len()) {
            let (now, later) = g.split_at(run.len());
            memory.step(run.clone(), |mut memory| {
                rule.select(RowsBlock { isa, memory: &mut memory, runs: &mut Runs::one(run), g: now });
            });
            g = later;
        }
    }
}

/// A decoded block of a sparse push, before its rule is known at compile time.
struct RowsBlock<'a, 'b, M> {
    isa: Isa,
    memory: &'a mut M,
    runs: &'a mut Runs<'b>,
    g: &'a [f32],
}

impl<M: Memory> WithRule for RowsBlock<'_, '_, M> {
    #[inline(always)]
    fn run_with(self, rule: impl Step) {
        let Self { isa, memory, runs, g } = self;
        memory.run(isa, StepRows { runs, g, rule });
    }
}

/// Adds one validated sparse body to its rows of `to`.
pub(crate) fn add_rows(isa: Isa, to: &mut [f32], touch: Touch<'_>) {
    apply_rows(isa, Exact::values(to), touch, SparseRule::Sgd(SgdRule::SUM));
}

/// Steps the next `g.len()` elements of the rows.
struct StepRows<'a, 'b, R> {
    runs: &'a mut Runs<'b>,
    g: &'a [f32],
    rule: R,
}

impl<R: Step> Work for StepRows<'_, '_, R> {
    #[inline(always)]
    fn run<S: Storage>(self, mut storage: S) {
        let mut g = self.g;
        while let Some(run) = self.runs.next_of(g.len()) {
            let (now, later) = g.split_at(run.len());
            storage.update(run.start, self.rule, now);
            g = later;
        }
    }
}
