//! The fused loop: decode, step, store. This is the only file that combines storage, codecs and optimizers.
//! It is compiled once per (storage, codec, optimizer, instruction set), except that racing memory has one
//! loop for all codecs but float32. A body with separately stored elements is decoded inside the step's own
//! loop, other bodies block by block; nothing is ever decoded into a temporary the size of the tensor.

use crate::base::block::{AlignedBlock, BLOCK, Block, Lane, blocks};
use crate::base::isa::{Isa, Kernel};
use crate::base::sync::Ordering;
use crate::kernel::codec::{Body, CodecId, Float32Body, WithBody, float64_lanes};
use crate::kernel::optim::{MAX_SLOTS, Rule, SgdRule, SgdStep, SparseRule, Step, WithRule};
use crate::kernel::rows::{Indices, RowLayout, Runs};
use crate::memory::{Buffer, Counts, RacyBuffer};
use std::ops::Range;

/// Parameters and optimizer state of one slice, accessed in runs of elements.
pub(crate) trait Storage {
    /// Maximum number of elements in one `update`.
    const SPAN: usize;
    /// A buffer for elements that are decoded together; their number divides [`BLOCK`].
    type Run: AsMut<[f32]>;
    const RUN: Self::Run;
    fn len(&self) -> usize;
    /// The elements in the order in which a push visits them: racing pushes begin at different blocks. Each
    /// range begins at a block, or is empty.
    type Ranges: Iterator<Item = Range<usize>>;
    fn ranges(&self) -> Self::Ranges;
    /// Steps `g.len()` elements from `at` on. This is a method and not a closure because it must be inlined
    /// into the loop that carries the target features.
    fn update<R: Step, G: Lane>(&mut self, at: usize, rule: R, g: &[G]);
}

/// Plain memory under the slice's lock, updated in place.
pub(crate) struct Exact<'a> {
    pub(crate) params: &'a mut [f32],
    pub(crate) state: &'a mut [Buffer],
}

impl Storage for Exact<'_> {
    const SPAN: usize = usize::MAX;
    type Run = RegisterRun;
    const RUN: RegisterRun = RegisterRun([0.0; REGISTER_RUN]);
    type Ranges = std::iter::Once<Range<usize>>;

    #[inline(always)]
    fn len(&self) -> usize {
        self.params.len()
    }

    #[inline(always)]
    fn ranges(&self) -> Self::Ranges {
        std::iter::once(0..self.params.len())
    }

    #[inline(always)]
    fn update<R: Step, G: Lane>(&mut self, at: usize, rule: R, g: &[G]) {
        let len = g.len();
        let used = self.state.len().min(MAX_SLOTS);
        let mut slots: [&mut [f32]; MAX_SLOTS] = Default::default();
        for (slot, buffer) in slots.iter_mut().zip(self.state.iter_mut()) {
            *slot = &mut buffer.values_mut::<f32>()[at..at + len];
        }
        rule.step(&mut self.params[at..at + len], &mut slots[..used], g);
    }
}

/// Elements of a run: every codec's smallest block, which stays in registers between decoder and step.
const REGISTER_RUN: usize = 64;

/// A buffer for a run, aligned in case the compiler spills it.
#[repr(align(64))]
pub(crate) struct RegisterRun([f32; REGISTER_RUN]);

impl AsMut<[f32]> for RegisterRun {
    #[inline(always)]
    fn as_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

/// Elements of a row that racing memory steps at a time: a small buffer is cheap to initialise.
pub(crate) const ROW: usize = 64;

/// Racing memory: at most `N` elements at a time are loaded into the first-level cache, stepped there, and
/// stored back.
pub(crate) struct Hogwild<'a, const N: usize = BLOCK> {
    pub(crate) isa: Isa,
    pub(crate) params: &'a RacyBuffer,
    pub(crate) state: &'a [RacyBuffer],
    pub(crate) first_block: usize,
    /// Counts how many updates of the first block racing updates overwrite.
    pub(crate) probe: Option<&'a Counts>,
}

impl<const N: usize> Hogwild<'_, N> {
    /// At the start of an update of the block at `at`: the probe and its present count, if this block is
    /// probed.
    #[inline(always)]
    fn probe(&self, at: usize) -> Option<(&Counts, u64)> {
        let counts = self.probe.filter(|_| at == 0)?;
        Some((counts, counts.kept().load(Ordering::Relaxed)))
    }
}

impl<const N: usize> Storage for Hogwild<'_, N> {
    const SPAN: usize = N;
    type Run = AlignedBlock<N>;
    const RUN: AlignedBlock<N> = AlignedBlock::ZERO;
    type Ranges = std::array::IntoIter<Range<usize>, 2>;

    #[inline(always)]
    fn len(&self) -> usize {
        self.params.len()
    }

    #[inline(always)]
    fn ranges(&self) -> Self::Ranges {
        let (n, first) = (self.params.len(), (self.first_block * BLOCK).min(self.params.len()));
        [first..n, 0..first].into_iter()
    }

    #[inline(always)]
    fn update<R: Step, G: Lane>(&mut self, at: usize, rule: R, g: &[G]) {
        let len = g.len();
        let (mut params, mut state) = (AlignedBlock::<N>::ZERO, [AlignedBlock::<N>::ZERO; MAX_SLOTS]);
        let params = &mut params.0[..len];
        let used = self.state.len().min(MAX_SLOTS);
        let probe = self.probe(at);
        self.params.load(self.isa, at, params);
        let mut slots: [&mut [f32]; MAX_SLOTS] = Default::default();
        for ((slot, memory), buffer) in slots.iter_mut().zip(state.iter_mut()).zip(self.state) {
            *slot = &mut memory.0[..len];
            buffer.load(self.isa, at, slot);
        }
        rule.step(params, &mut slots[..used], g);
        self.params.store(self.isa, at, params);
        if let Some((counts, kept)) = probe {
            // Loaded and stored as the values are, so a race that overwrites the values also overwrites this
            // count.
            counts.kept().store(kept.wrapping_add(1), Ordering::Relaxed);
            counts.probed().fetch_add(1, Ordering::Relaxed);
        }
        for (memory, buffer) in state.iter().zip(self.state) {
            buffer.store(self.isa, at, &memory.0[..len]);
        }
    }
}

/// Applies one validated body to one slice.
#[inline(always)]
pub(crate) fn apply(isa: Isa, storage: Exact<'_>, codec: CodecId, body: &[u8], scale: f32, rule: Rule) {
    let n = storage.len();
    codec.select(body, n, Encoded { isa, storage, scale, rule });
}

/// A dense push, before its codec is known at compile time.
struct Encoded<S> {
    isa: Isa,
    storage: S,
    scale: f32,
    rule: Rule,
}

impl<S: Storage> WithBody for Encoded<S> {
    type Out = ();
    #[inline(always)]
    fn run_with(self, body: impl Body) {
        let Self { isa, storage, scale, rule } = self;
        with_body(isa, storage, body, scale, rule);
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
        let mut scaled = [0.0; REGISTER_RUN];
        for (g, at) in g.chunks(REGISTER_RUN).zip((0..).step_by(REGISTER_RUN)) {
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
    apply(isa, Exact { params: to, state: &mut [] }, codec, body, scale, Rule::Sgd(SgdRule::SUM));
}

/// Applies one validated body to racing memory. The step copies blocks anyway, so a body's decoder need not
/// be part of the loop.
#[inline(always)]
pub(crate) fn apply_racing(
    isa: Isa,
    storage: Hogwild<'_>,
    codec: CodecId,
    body: &[u8],
    scale: f32,
    rule: Rule,
) {
    let n = storage.len();
    match codec {
        CodecId::Float32 => with_body(isa, storage, Float32Body::new(body, n), scale, rule),
        _ => with_body(isa, storage, AnyBody { isa, codec, body, n }, scale, rule),
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
fn with_body(isa: Isa, storage: impl Storage, body: impl Body, scale: f32, rule: Rule) {
    rule.select(DensePush { isa, storage, body, scale });
}

/// A dense push, before its rule is known at compile time.
struct DensePush<S, B> {
    isa: Isa,
    storage: S,
    body: B,
    scale: f32,
}

impl<S: Storage, B: Body> WithRule for DensePush<S, B> {
    #[inline(always)]
    fn run_with(self, rule: impl Step) {
        let Self { isa, storage, body, scale } = self;
        run(isa, Fused { storage, body, scale, rule });
    }
}

/// Unit tests run only the scalar loops: compiling all loops takes minutes, and `tests/api/isa.rs` tests
/// them.
#[inline(always)]
fn run(isa: Isa, kernel: impl Kernel<Out = ()>) {
    if cfg!(test) { kernel.run() } else { isa.run(kernel) }
}

struct Fused<S, B, R> {
    storage: S,
    body: B,
    scale: f32,
    rule: R,
}

impl<S: Storage, B: Body, R: Step> Kernel for Fused<S, B, R> {
    type Out = ();
    const WIDE: bool = B::WIDE;

    #[inline(always)]
    fn run(mut self) {
        let lanes = self.scale == 1.0 && self.body.lanes(0..self.storage.len()).is_some();
        // A loop and not two calls: each call would copy the step into each of some hundred kernels.
        for range in self.storage.ranges() {
            if lanes {
                self.lanes(range);
            } else {
                self.runs(range);
            }
        }
    }
}

impl<S: Storage, B: Body, R: Step> Fused<S, B, R> {
    /// Steps a body whose elements are stored separately.
    #[inline(always)]
    fn lanes(&mut self, Range { start: mut at, end }: Range<usize>) {
        while at < end {
            let Some(lanes) = self.body.lanes(at..end.min(at + S::SPAN)) else { return };
            self.storage.update(at, self.rule, lanes);
            at += lanes.len();
        }
    }

    /// Steps any body, run by run.
    #[inline(always)]
    fn runs(&mut self, Range { start: mut at, end }: Range<usize>) {
        let mut run = S::RUN;
        let g = run.as_mut();
        // Whole runs are a separate loop, so that their length is a compile-time constant.
        while end - at >= g.len() {
            self.run_at(at, g);
            at += g.len();
        }
        if at < end {
            // A separate buffer: slicing `run` would force it into memory.
            let mut rest = S::RUN;
            self.run_at(at, &mut rest.as_mut()[..end - at]);
        }
    }

    #[inline(always)]
    fn run_at(&mut self, at: usize, g: &mut [f32]) {
        self.body.decode(at, g);
        if self.scale != 1.0 {
            for x in g.iter_mut() {
                *x *= self.scale;
            }
        }
        self.storage.update(at, self.rule, &*g);
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

/// Applies one validated sparse body to its rows of one slice. Sparse values are few, so they are decoded
/// block by block, and one loop per rule steps them for all codecs.
pub(crate) fn apply_rows(isa: Isa, mut storage: impl Storage, touch: Touch<'_>, rule: SparseRule) {
    let Touch { layout, indices, codec, body, elements, scale } = touch;
    let mut runs = layout.runs(indices);
    let mut block = Block::ZERO;
    for (at, len) in blocks(elements) {
        let g = &mut block.0[..len];
        codec.decode_block(isa, body, elements, at, g);
        if scale != 1.0 {
            for x in g.iter_mut() {
                *x *= scale;
            }
        }
        rule.select(RowsBlock { isa, storage: &mut storage, runs: &mut runs, g });
    }
}

/// A decoded block of a sparse push, before its rule is known at compile time.
struct RowsBlock<'a, 'b, S> {
    isa: Isa,
    storage: &'a mut S,
    runs: &'a mut Runs<'b>,
    g: &'a [f32],
}

impl<S: Storage> WithRule for RowsBlock<'_, '_, S> {
    #[inline(always)]
    fn run_with(self, rule: impl Step) {
        let Self { isa, storage, runs, g } = self;
        isa.run(StepRows { storage, runs, g, rule });
    }
}

/// Adds one validated sparse body to its rows of `to`.
pub(crate) fn add_rows(isa: Isa, to: &mut [f32], touch: Touch<'_>) {
    apply_rows(isa, Exact { params: to, state: &mut [] }, touch, SparseRule::Sgd(SgdRule::SUM));
}

/// Steps the next `g.len()` elements of the rows.
struct StepRows<'a, 'b, S, R> {
    storage: &'a mut S,
    runs: &'a mut Runs<'b>,
    g: &'a [f32],
    rule: R,
}

impl<S: Storage, R: Step> Kernel for StepRows<'_, '_, S, R> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let mut g = self.g;
        while let Some(run) = self.runs.next_of(g.len().min(S::SPAN)) {
            let (now, later) = g.split_at(run.len());
            self.storage.update(run.start, self.rule, now);
            g = later;
        }
    }
}
