//! Exports tensors as one safetensors file, each whole and under its name.

use crate::files::io::{failed, sync_directory};
use crate::files::names::UNFINISHED_SUFFIX;
use crate::files::output::Output;
use crate::files::removal::remove;
use crate::snapshot::safetensors::{Layout, TensorDigest};
use crate::tools::shards::joined;
use crate::tools::source::{Reading, Source, Tensor};
use crate::tools::target::parent;
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::PullView;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// The result of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exported {
    /// Number of tensors.
    pub tensors: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// Irregularities and omissions, one sentence each.
    pub notes: Vec<String>,
}

/// Receives bytes.
type Sink<'s> = &'s mut dyn FnMut(&[u8]) -> Result<()>;

/// Values of a tensor, or a slot of its optimizer, for a file.
pub struct ExportPart<'a> {
    pub(crate) tensor: String,
    pub(crate) slot: Option<String>,
    pub(crate) shape: Vec<u64>,
    pub(crate) dtype: DType,
    pub(crate) elements: usize,
    pub(crate) bytes: Box<dyn Fn(Sink<'_>) -> Result<()> + 'a>,
}

/// What a part of an export holds of a tensor.
#[derive(Clone, Copy, Debug)]
pub enum Exports<'a> {
    /// The values, or their average.
    View(PullView),
    /// A slot of the state.
    Slot(&'a str),
}

impl<'a> ExportPart<'a> {
    /// The values of a tensor in this view, or its slot of this name. `bytes` passes them on, little-endian, each
    /// time that it is called.
    pub fn new(spec: &TensorSpec, part: Exports<'_>, bytes: impl Fn(Sink<'_>) -> Result<()> + 'a) -> Self {
        let (slot, dtype) = match part {
            Exports::View(view) => (None, view.dtype(spec)),
            Exports::Slot(slot) => (Some(slot.to_owned()), spec.dtype.computed()),
        };
        Self {
            tensor: spec.name.to_string(),
            slot,
            shape: spec.shape.clone(),
            dtype,
            elements: spec.elements(),
            bytes: Box::new(bytes),
        }
    }

    /// Its name in the file.
    fn name(&self) -> String {
        self.slot.as_ref().map_or(self.tensor.clone(), |slot| format!("{}.{slot}", self.tensor))
    }
}

impl fmt::Debug for ExportPart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExportPart").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// Writes a safetensors file with every tensor of `source` and, with `state`, every slot of its state
/// (`name.slot`). `view`: what stands under the tensors' names.
pub fn export(source: &Path, file: &Path, state: bool, view: PullView, reading: Reading) -> Result<Exported> {
    check_is_new(file)?;
    let source = Source::open(source, reading)?;
    let tensors = source.tensors()?;
    let without = without_view(tensors.iter().map(|tensor| &tensor.holding.spec), view)?;
    let parts = tensors.iter().flat_map(|tensor| parts(tensor, state, view)).collect();
    let bytes = write_parts(file, parts)?;
    let notes = source.notes.iter().cloned().chain(without).collect();
    Ok(Exported { tensors: tensors.len() as u64, bytes, notes })
}

/// Notes on the tensors that do not have this view, whose values are exported. Fails if none has it.
pub fn without_view<'a>(
    specs: impl Iterator<Item = &'a TensorSpec> + Clone,
    view: PullView,
) -> Result<Vec<String>> {
    let without = specs.clone().filter(|spec| view == PullView::Average && spec.need_average().is_err());
    let notes: Vec<_> = without
        .map(|spec| format!("tensor {:?} keeps no average: these are its values", spec.name))
        .collect();
    if let (Some(first), true) = (specs.clone().next(), !notes.is_empty() && notes.len() == specs.count()) {
        first.need_average()?;
    }
    Ok(notes)
}

/// Fails if there is such a file.
pub fn check_is_new(file: &Path) -> Result<()> {
    if !file.exists() {
        return Ok(());
    }
    let why = format!("{} already exists", file.display());
    Err(Error::new(Kind::Config, why).expected("a new file", file.display()))
}

/// Writes a new safetensors file with the SHA-256 of each part in the metadata. The shards of a parameter,
/// `name@k/n`, become one. The file appears when it is durable. Returns its length.
pub fn write_parts(file: &Path, parts: Vec<ExportPart<'_>>) -> Result<u64> {
    let taken = |why: String| Err(Error::new(Kind::Config, why).expected("a new file", file.display()));
    check_is_new(file)?;
    let Some(name) = file.file_name() else {
        return taken(format!("{} is not a file name", file.display()));
    };
    let mut unfinished = name.to_owned();
    unfinished.push(UNFINISHED_SUFFIX);
    let path = file.with_file_name(&unfinished);
    let mut output = Output::create(&path)?;
    let written = write(&joined(parts), &mut output).and_then(|()| {
        let bytes = output.finish()?.bytes;
        std::fs::rename(&path, file).map_err(|error| failed("rename", &path, &error))?;
        sync_directory(parent(file))?;
        Ok(bytes)
    });
    if written.is_err() {
        let _ = remove(&path);
    }
    written
}

fn write(parts: &[ExportPart<'_>], output: &mut Output) -> Result<()> {
    let (mut layout, mut digests) = (Layout::default(), BTreeMap::new());
    for part in parts {
        let name = layout.add(part.name(), part.shape.clone(), part.dtype, part.elements);
        let mut digest = TensorDigest::new(&part.shape, part.dtype);
        (part.bytes)(&mut |bytes| {
            digest.update(bytes);
            Ok(())
        })?;
        digests.insert(name, digest.finish());
    }
    layout.add_digests(&digests)?;
    output.write(&layout.header()?)?;
    for part in parts {
        (part.bytes)(&mut |bytes| output.write(bytes).map(drop))?;
    }
    Ok(())
}

/// Parts of a tensor in the file.
fn parts<'a>(tensor: &'a Tensor<'_>, state: bool, view: PullView) -> Vec<ExportPart<'a>> {
    let spec = &tensor.holding.spec;
    let slots = spec.slots().into_iter().filter(|_| state).enumerate();
    let view = if spec.need_average().is_ok() { view } else { PullView::Values };
    let slots = slots.map(|(slot, name)| {
        ExportPart::new(spec, Exports::Slot(name), move |to| each_slot(tensor, slot, to))
    });
    std::iter::once(ExportPart::new(spec, Exports::View(view), move |to| each(tensor, view, to)))
        .chain(slots)
        .collect()
}

/// Passes on the values of a tensor or their average, slice by slice.
fn each(tensor: &Tensor<'_>, view: PullView, to: Sink<'_>) -> Result<()> {
    tensor.slices.iter().try_for_each(|slice| match view {
        PullView::Values => to(slice.pull(0)?.as_ref()),
        PullView::Average => to(slice.pull_average(0)?.as_ref()),
    })
}

/// Passes on a slot, slice by slice. A slice stores its slots consecutively.
fn each_slot(tensor: &Tensor<'_>, slot: usize, to: Sink<'_>) -> Result<()> {
    tensor.slices.iter().try_for_each(|slice| {
        let (image, bytes) = (slice.image()?, slice.slot_bytes());
        to(&image.state.as_ref()[slot * bytes..(slot + 1) * bytes])
    })
}
