//! The tensors of a cluster without a session: the map of shard 0, and what each shard knows of their changes.

use crate::inspect::{Asker, ClusterView, run};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::tensor::TensorSpec;
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use fastps_transport::tls::TlsFiles;
use futures_util::future::join_all;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

/// Most tensors named in one question about changes.
const NAMES_ASKED: usize = 1000;

/// A tensor on the servers.
#[derive(Debug)]
pub struct ListedTensor {
    /// Its specification.
    pub spec: TensorSpec,
    /// The smallest version of its slices; `None` if not every shard with slices told it.
    pub version: Option<u64>,
    /// Time since its last change; `None` without one since the servers' start, or as for `version`.
    pub changed: Option<Duration>,
}

/// The tensors of a cluster whose names begin with `prefix`, and the shards as they answered: see
/// [`crate::inspect()`]. Fails if shard 0, which has the map, does not answer.
pub fn list(
    addresses: &[String],
    tls: &TlsFiles,
    token_file: Option<&Path>,
    timeout: Duration,
    prefix: &str,
) -> Result<(ClusterView, Vec<ListedTensor>)> {
    let asker = Asker::new(tls, token_file, timeout, &[])?;
    run(async {
        let mut cluster = asker.look(addresses).await?;
        let first = cluster.shards.iter().find(|view| view.shard == Some(0));
        let missing = || Error::new(Kind::Connection, "shard 0, which has the list of tensors, is not known");
        let first = first.ok_or_else(missing)?;
        if let Err(error) = &first.answer {
            let mut error = error.clone();
            error.message =
                format!("shard 0 at {}, which has the list of tensors: {}", first.address, error.message);
            return Err(error.shard(0));
        }
        let entries = map(&asker, &first.address, prefix).await?;
        let states = ask_changes(&asker, &mut cluster, &entries).await;
        let tensors = entries.into_iter().zip(states);
        let tensors = tensors.map(|((spec, _), (version, changed))| ListedTensor { spec, version, changed });
        Ok((cluster, tensors.collect()))
    })
}

/// The entries of the map with this prefix: each tensor, and the shards of its slices.
async fn map(asker: &Asker<'_>, first: &str, prefix: &str) -> Result<Vec<(TensorSpec, BTreeSet<u32>)>> {
    let (mut control, mut all, mut after) = (asker.control(first)?, Vec::new(), prefix.to_owned());
    loop {
        let ask = pb::GetMapRequest { names: Vec::new(), after: after.clone(), page_size: 0 };
        let page = asker.answer(first, control.get_map(asker.request(ask))).await;
        let page = page.map_err(|error| error.shard(0))?;
        for entry in page.entries {
            let spec = convert::spec_from_wire(entry.spec.as_ref())?;
            if !spec.name.starts_with(prefix) {
                return Ok(all);
            }
            all.push((spec, entry.placement.into_iter().flat_map(|placement| placement.shards).collect()));
        }
        if page.next.is_empty() || page.next <= after {
            return Ok(all);
        }
        after = page.next;
    }
}

/// Per tensor: its version and its last change. A shard that fails becomes one that does not answer.
async fn ask_changes(
    asker: &Asker<'_>,
    cluster: &mut ClusterView,
    entries: &[(TensorSpec, BTreeSet<u32>)],
) -> Vec<(Option<u64>, Option<Duration>)> {
    let asked = join_all(cluster.shards.iter_mut().map(async |view| {
        let shard = view.shard.filter(|_| view.answer.is_ok())?;
        let here = entries.iter().filter(|(_, shards)| shards.contains(&shard));
        let names: Vec<_> = here.map(|(spec, _)| spec.name.to_string()).collect();
        let mut all = pb::StatsResponse::default();
        for names in names.chunks(NAMES_ASKED) {
            match asker.stats(&view.address, names.to_vec()).await {
                Ok(part) => {
                    all.versions.extend(part.versions);
                    all.changed_ms_ago.extend(part.changed_ms_ago);
                }
                Err(error) => {
                    view.answer = Err(error);
                    return None;
                }
            }
        }
        Some((shard, all))
    }));
    let told: BTreeMap<_, _> = asked.await.into_iter().flatten().collect();
    let state = |(spec, shards): &(TensorSpec, BTreeSet<u32>)| {
        let parts: Option<Vec<_>> = shards.iter().map(|shard| told.get(shard)).collect();
        let Some(parts) = parts else { return (None, None) };
        let version = |part: &&pb::StatsResponse| part.versions.get(&*spec.name).copied();
        let versions: Option<Vec<_>> = parts.iter().map(version).collect();
        let changed = parts.iter().filter_map(|part| part.changed_ms_ago.get(&*spec.name).copied()).min();
        (versions.and_then(|all| all.into_iter().min()), changed.map(Duration::from_millis))
    };
    entries.iter().map(state).collect()
}
