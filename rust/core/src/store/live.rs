//! Direct access to the values of a shared store, in memory that several processes map.

use super::Store;
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::Arc;
use crate::tensor::TensorSpec;
use crate::tensor::shared_directory::{Directory, SharedTensor};

/// A tensor's values in place, in memory that other processes map, too.
#[derive(Clone, Debug)]
pub struct Live(Arc<SharedTensor>);

impl Live {
    /// The tensor's spec.
    pub fn spec(&self) -> &TensorSpec {
        self.0.spec()
    }

    /// Pointer to the first of the tensor's elements. Other threads and processes load and store them at any
    /// time, so no reference to them may be created.
    pub fn as_ptr(&self) -> *const u8 {
        self.0.values()
    }
}

impl Store {
    /// The address at which other processes of this user can open the store while this process lives, if its
    /// memory is shared; a forked child has its own.
    pub fn address(&self) -> Option<String> {
        self.shared.directory.as_ref().map(Directory::address)
    }

    /// A tensor's values in place, valid while the returned object lives; other threads and processes step
    /// them at the same time.
    pub fn live(&self, name: &str) -> Result<Live> {
        let tensor = self.tensor(name)?;
        let shared = tensor.shared.clone().ok_or_else(|| {
            Error::new(Kind::Config, "only a shared store has views of its values")
                .tensor(name)
                .expected("Store(shared=True)", "a store of one process")
        })?;
        Ok(Live(shared))
    }
}
