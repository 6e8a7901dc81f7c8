//! Exports a data directory as one safetensors file, with each tensor whole and under its name.

use crate::files::io::{failed, sync_directory};
use crate::files::names::UNFINISHED_SUFFIX;
use crate::files::output::Output;
use crate::files::removal::remove;
use crate::snapshot::safetensors::Layout;
use crate::tools::source::{Reading, Source, Tensor};
use crate::tools::target::parent;
use fastps_core::error::{Error, Kind, Result};
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

/// Writes a safetensors file with every tensor of `source` and, with `state`, every slot of its optimizer
/// (`name.slot`). The file appears when it is durable.
pub fn export(source: &Path, file: &Path, state: bool, reading: Reading) -> Result<Exported> {
    let taken = |why: String| Err(Error::new(Kind::Config, why).expected("a new file", file.display()));
    if file.exists() {
        return taken(format!("{} already exists", file.display()));
    }
    let Some(name) = file.file_name() else {
        return taken(format!("{} is not a file name", file.display()));
    };
    let mut unfinished = name.to_owned();
    unfinished.push(UNFINISHED_SUFFIX);
    let path = file.with_file_name(&unfinished);
    let source = Source::open(source, reading)?;
    let tensors = source.tensors()?;
    let mut output = Output::create(&path)?;
    let written = write(&tensors, state, &mut output).and_then(|()| {
        let bytes = output.finish()?.bytes;
        std::fs::rename(&path, file).map_err(|error| failed("rename", &path, &error))?;
        sync_directory(parent(file))?;
        Ok(bytes)
    });
    if written.is_err() {
        let _ = remove(&path);
    }
    Ok(Exported { tensors: tensors.len() as u64, bytes: written?, notes: source.notes.clone() })
}

fn write(tensors: &[Tensor<'_>], state: bool, output: &mut Output) -> Result<()> {
    let mut layout = Layout::default();
    for Tensor { holding, .. } in tensors {
        let spec = &holding.spec;
        let mut add = |name| layout.add(name, spec.shape.clone(), spec.dtype, spec.elements());
        add(spec.name.to_string());
        for slot in spec.optimizer.slots().iter().filter(|_| state) {
            add(format!("{}.{slot}", spec.name));
        }
    }
    output.write(&layout.header()?)?;
    for Tensor { holding, slices, .. } in tensors {
        for slice in slices {
            output.write(slice.image()?.values.as_ref())?;
        }
        let slots = if state { holding.spec.optimizer.slots().len() } else { 0 };
        // A slice stores its slots one after the other; in the file each slot is whole.
        for slot in 0..slots {
            for slice in slices {
                let image = slice.image()?;
                let bytes = slice.bytes();
                output.write(&image.state.as_ref()[slot * bytes..(slot + 1) * bytes])?;
            }
        }
    }
    Ok(())
}
