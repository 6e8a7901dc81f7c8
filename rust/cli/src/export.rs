//! `fastps checkpoint export` of servers: the tensors of a running cluster, as of one moment, in one file.

use fastps_client::Client;
use fastps_core::dtype::Array;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::tensor::{TensorSpec, Versions};
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{OptimizerState, PullOptions, PullView};
use fastps_durable::{ExportPart, Exported, Exports, check_is_new, without_view, write_parts};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A tensor as it was read.
struct Tensor {
    spec: Arc<TensorSpec>,
    /// What stands in `values`.
    view: PullView,
    values: Array,
    /// Optimizer state, if it is exported.
    state: Option<OptimizerState>,
}

/// Writes the tensors of the client's namespace, and with `state` the slots of their state. `view`: what
/// stands under their names.
pub(crate) fn of_servers(
    client: &Client,
    file: &Path,
    state: bool,
    view: PullView,
    timeout: Duration,
) -> Result<Exported> {
    check_is_new(file)?;
    let end = Instant::now() + timeout;
    let left = || end.saturating_duration_since(Instant::now());
    let names = client.names(left())?;
    if names.is_empty() {
        let why = "the servers have no tensor to export: fastps ls lists namespaces and tensors";
        return Err(Error::new(Kind::Config, why));
    }
    let specs = names.iter().map(|name| client.spec(name, left())).collect::<Result<Vec<_>>>()?;
    let notes = without_view(specs.iter().map(|spec| &**spec), view)?;
    let averaged = |spec: &&Arc<TensorSpec>| view == PullView::Average && spec.need_average().is_ok();
    let averaged: Vec<_> = specs.iter().filter(averaged).map(|spec| spec.name.clone()).collect();
    let tensors = client.read_at_one_moment(&names, left(), |left| {
        read(client, &names, &specs, (state, &averaged[..]), left)
    })?;
    let bytes = write_parts(file, tensors.iter().flat_map(parts).collect())?;
    Ok(Exported { tensors: tensors.len() as u64, bytes, notes })
}

fn read(
    client: &Client,
    names: &[Arc<str>],
    specs: &[Arc<TensorSpec>],
    (state, averaged): (bool, &[Arc<str>]),
    left: Duration,
) -> Result<(Vec<Tensor>, Versions)> {
    let empty = |spec: &Arc<TensorSpec>| Tensor {
        spec: spec.clone(),
        view: PullView::Values,
        values: Array::zeros(spec.dtype, spec.elements()),
        state: None,
    };
    let mut tensors: Vec<_> = specs.iter().map(empty).collect();
    let versions = client.pull(names, left, &mut |tensor: usize, first: usize, values: &[u8]| {
        tensors[tensor].values.write(first, values);
    })?;
    if !averaged.is_empty() {
        let places = averaged.iter().map(|name| names.iter().position(|known| known == name));
        let places: Vec<_> = places.flatten().collect();
        for place in &places {
            let tensor = &mut tensors[*place];
            tensor.view = PullView::Average;
            tensor.values = Array::zeros(tensor.view.dtype(&tensor.spec), tensor.spec.elements());
        }
        let mut take = |k: usize, first: usize, average: &[u8]| {
            tensors[places[k]].values.write(first, average);
        };
        let options = PullOptions { view: PullView::Average, ..Default::default() };
        client.pull_as(averaged, &options, left, &mut take)?;
    }
    for tensor in tensors.iter_mut().filter(|_| state) {
        tensor.state = Some(client.state(&tensor.spec.name, left)?);
    }
    Ok((tensors, versions))
}

fn parts(tensor: &Tensor) -> Vec<ExportPart<'_>> {
    let slots = tensor.state.iter().flat_map(|state| &state.slots);
    let slots = slots.map(|(slot, values)| {
        ExportPart::new(&tensor.spec, Exports::Slot(slot), |to| to(values.view().bytes()))
    });
    std::iter::once(ExportPart::new(&tensor.spec, Exports::View(tensor.view), |to| {
        to(tensor.values.view().bytes())
    }))
    .chain(slots)
    .collect()
}
