//! Values where they lie, in memory that several processes have.

use super::Store;
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::Arc;
use crate::slice::shared_directory::{Directory, SharedTensor};
use crate::tensor::TensorSpec;

/// A tensor's values where they lie, in memory that other processes have, too.
#[derive(Clone, Debug)]
pub struct Live(Arc<SharedTensor>);

impl Live {
    /// What the tensor is.
    pub fn spec(&self) -> &TensorSpec {
        self.0.spec()
    }

    /// The first of as many values as the tensor has elements. Threads of other processes load and store them
    /// at any time: no reference to them may be made.
    pub fn as_ptr(&self) -> *const u8 {
        self.0.values()
    }
}

impl Store {
    /// By what other processes of this user can open the store while this process lives, if its memory is
    /// shared; a forked child has an address of its own.
    pub fn address(&self) -> Option<String> {
        self.shared.directory.as_ref().map(Directory::address)
    }

    /// A tensor's values where they lie, for as long as what is returned lives; other threads and processes
    /// step them meanwhile.
    pub fn live(&self, name: &str) -> Result<Live> {
        let tensor = self.tensor(name)?;
        let shared = tensor.shared.clone().ok_or_else(|| {
            Error::new(Kind::Config, "only a shared store has values that can be looked at where they lie")
                .tensor(name)
                .expected("Store(shared=True)", "a store of one process")
        })?;
        Ok(Live(shared))
    }
}
