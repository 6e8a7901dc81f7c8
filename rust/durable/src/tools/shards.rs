//! Joins the shards of a parameter, tensors named `name@k/n`, into one tensor for an export.

use crate::tools::export::ExportPart;
use fastps_core::error::Result;
use std::collections::{BTreeMap, HashSet};

/// A parameter's number of shards, and its name with that of a slot.
type Whole = (String, Option<String>, u32);

/// Joins the parts whose tensors are the shards of one parameter along their first dimension, and leaves the
/// others as they are. Shards of which one is missing, or that do not fit together, remain tensors.
pub(crate) fn joined(parts: Vec<ExportPart<'_>>) -> Vec<ExportPart<'_>> {
    let names: HashSet<_> = parts.iter().map(|part| (part.tensor.clone(), part.slot.clone())).collect();
    let mut shards: BTreeMap<Whole, BTreeMap<u32, ExportPart<'_>>> = BTreeMap::new();
    let mut others = Vec::new();
    for part in parts {
        match shard(&part.tensor) {
            Some((name, k, n)) if !names.contains(&(name.to_owned(), part.slot.clone())) => {
                let whole = (name.to_owned(), part.slot.clone(), n);
                shards.entry(whole).or_default().insert(k, part);
            }
            _ => others.push(part),
        }
    }
    for ((name, slot, n), found) in shards {
        let found: Vec<_> = found.into_values().collect();
        if found.len() == n as usize && fit(&found) {
            others.push(join(name, slot, found));
        } else {
            others.extend(found);
        }
    }
    others
}

/// The parameter of a tensor `name@k/n`, k, and n.
fn shard(tensor: &str) -> Option<(&str, u32, u32)> {
    let (name, number) = tensor.rsplit_once('@')?;
    let (k, n) = number.split_once('/')?;
    let (k, n): (u32, u32) = (k.parse().ok()?, n.parse().ok()?);
    (!name.is_empty() && k < n && number == format!("{k}/{n}")).then_some((name, k, n))
}

/// Returns whether parts have one dtype and differ in their first dimension only.
fn fit(parts: &[ExportPart<'_>]) -> bool {
    let rest = |part: &ExportPart<'_>| part.shape.get(1..).map(<[u64]>::to_vec);
    let Some(first) = parts.first() else { return false };
    rest(first).is_some() && parts.iter().all(|part| part.dtype == first.dtype && rest(part) == rest(first))
}

fn join(tensor: String, slot: Option<String>, shards: Vec<ExportPart<'_>>) -> ExportPart<'_> {
    let rows = shards.iter().map(|part| part.shape[0]).sum();
    let shape: Vec<u64> = std::iter::once(rows).chain(shards[0].shape[1..].iter().copied()).collect();
    let (dtype, elements) = (shards[0].dtype, shards.iter().map(|part| part.elements).sum());
    let bytes = move |to: &mut dyn FnMut(&[u8]) -> Result<()>| {
        shards.iter().try_for_each(|shard| (shard.bytes)(&mut *to))
    };
    ExportPart { tensor, slot, shape, dtype, elements, bytes: Box::new(bytes) }
}

#[cfg(test)]
mod tests {
    use super::shard;

    #[test]
    fn shards_are_known_by_their_names() {
        assert_eq!(shard("a@b@1/2"), Some(("a@b", 1, 2)));
        for name in ["w", "w@1", "w@2/2", "@0/2", "w@00/2", "w@0/+2", "w@-1/2", "w@0/0", "w@0/4294967296"] {
            assert_eq!(shard(name), None, "{name}");
        }
    }
}
