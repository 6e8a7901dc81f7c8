//! The order of slices in a snapshot, and the safetensors headers that describe it.

use crate::catalog::{Catalog, Reservation};
use crate::snapshot::safetensors::Layout;

/// The slices in the order in which they are written: by tensor, then by index.
pub(super) fn in_order(catalog: &Catalog) -> Vec<(u64, usize, &Reservation)> {
    let mut slices: Vec<_> = catalog.slices().collect();
    slices.sort_by(|a, b| (&a.2.spec.name, a.1, a.0).cmp(&(&b.2.spec.name, b.1, b.0)));
    slices
}

/// Lays out the values and the state. A tensor that is entirely on this shard appears under its name and
/// shape; otherwise each run of adjacent slices appears flat, as `name[first:end]`. State is named
/// `name.slot`.
pub(super) fn layout(slices: &[(u64, usize, &Reservation)]) -> (Layout, Layout) {
    let (mut values, mut state) = (Layout::default(), Layout::default());
    for run in slices.chunk_by(|a, b| std::ptr::eq(a.2, b.2) && a.1 + 1 == b.1) {
        let (Some((_, first, reservation)), Some((_, last, _))) = (run.first(), run.last()) else { continue };
        let spec = &reservation.spec;
        let elements = spec.slice_range(*first).start..spec.slice_range(*last).end;
        let (name, shape) = if run.len() == spec.slice_count() {
            (spec.name.to_string(), spec.shape.clone())
        } else {
            let name = format!("{}[{}:{}]", spec.name, elements.start, elements.end);
            (name, vec![elements.len() as u64])
        };
        values.add(name.clone(), shape, spec.dtype, elements.len());
        // A slice's slots are contiguous, so the slots of several slices are interleaved.
        for (_, k, _) in run {
            let slice = spec.slice_range(*k);
            for slot in spec.slots() {
                let whole = run.len() == 1 && spec.slice_count() == 1;
                let (name, shape) = if whole {
                    (format!("{}.{slot}", spec.name), spec.shape.clone())
                } else {
                    let name = format!("{}.{slot}[{}:{}]", spec.name, slice.start, slice.end);
                    (name, vec![slice.len() as u64])
                };
                state.add(name, shape, spec.dtype.computed(), slice.len());
            }
        }
    }
    (values, state)
}
