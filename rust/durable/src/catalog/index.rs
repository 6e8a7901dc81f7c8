//! Look-up tables that let the catalog apply an event without a scan of all its entries.

use crate::catalog::{Holding, Reservation};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Built on the first look-up: most catalogs are copies that are never searched.
#[derive(Debug, Default)]
pub(crate) struct Index {
    slices: Option<HashMap<u64, u64>>,
    names: Option<HashMap<Arc<str>, u64>>,
}

/// The index holds nothing that the catalog does not hold.
impl PartialEq for Index {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Clone for Index {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Index {
    /// Adds a reservation.
    pub(crate) fn reserved(&mut self, id: u64, reservation: &Reservation) {
        if let Some(known) = &mut self.slices {
            known.extend(reservation.slices.iter().map(|(slice, _)| (*slice, id)));
        }
    }

    /// Removes slices that are about to be dropped. Returns their reservations.
    pub(crate) fn dropped(&mut self, slices: &[u64], all: &BTreeMap<u64, Reservation>) -> BTreeSet<u64> {
        let of = |(id, reservation): (&u64, &Reservation)| {
            let id = *id;
            reservation.slices.iter().map(move |(slice, _)| (*slice, id)).collect::<Vec<_>>()
        };
        let known = self.slices.get_or_insert_with(|| all.iter().flat_map(of).collect());
        slices.iter().filter_map(|slice| known.remove(slice)).collect()
    }

    /// Adds a tensor.
    pub(crate) fn entered(&mut self, id: u64, holding: &Holding) {
        if let Some(known) = &mut self.names {
            known.insert(holding.spec.name.clone(), id);
        }
    }

    /// Removes a tensor that is about to be removed. Returns its reservation.
    pub(crate) fn removed(&mut self, name: &str, all: &BTreeMap<u64, Holding>) -> Option<u64> {
        let of = |(id, holding): (&u64, &Holding)| (holding.spec.name.clone(), *id);
        self.names.get_or_insert_with(|| all.iter().map(of).collect()).remove(name)
    }
}
