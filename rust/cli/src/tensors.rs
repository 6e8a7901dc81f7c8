//! `fastps ls` and `fastps rm`: what a cluster holds, by namespace, and how to free it.

use crate::addresses::{ADDRESSES, with_addresses};
use crate::command::{in_json, note, show};
use crate::credentials::Credentials;
use crate::status::table;
use clap::{Args, Parser};
use fastps_client::{Client, ClusterView, ConnectOptions, ListedTensor, list};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::optim::{Optimizer, Value};
use fastps_core::verbs::prelude::*;
use fastps_server::human::duration;
use serde_json::{Map, json};
use std::ffi::OsString;
use std::time::{Duration, Instant};

/// Prefix of the names of a namespace's tensors on the servers.
const MARK: &str = "run:";
/// How long `rm` waits for the list of tensors, at most.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

/// List the tensors of a running cluster, by namespace, with their last change. The exit code is 1 if a shard
/// does not answer: VERSION and LAST CHANGE of its tensors are not known then.
#[derive(Debug, Parser)]
#[command(name = "fastps ls")]
pub(crate) struct LsArgs {
    #[command(flatten)]
    cluster: Cluster,
    /// Seconds to wait for an answer.
    #[arg(long, default_value = "5", value_name = "SECONDS", value_parser = crate::seconds)]
    timeout: Duration,
    /// List only the tensors of this namespace.
    #[arg(long, value_name = "NAME")]
    namespace: Option<String>,
    /// Print one JSON list.
    #[arg(long)]
    json: bool,
}

/// Free all tensors of a namespace. The servers and later snapshots no longer have them.
#[derive(Debug, Parser)]
#[command(name = "fastps rm")]
pub(crate) struct RmArgs {
    #[command(flatten)]
    cluster: Cluster,
    /// Seconds to wait for an answer.
    #[arg(long, default_value = "30", value_name = "SECONDS", value_parser = crate::seconds)]
    timeout: Duration,
    /// The namespace whose tensors are freed.
    #[arg(long, value_name = "NAME")]
    namespace: String,
}

#[derive(Debug, Args)]
struct Cluster {
    /// Addresses of the shards.
    #[arg(value_delimiter = ',', help = ADDRESSES)]
    addresses: Vec<String>,
    #[command(flatten)]
    credentials: Credentials,
}

/// Runs `ls` and returns the exit status. The first argument is the program's name.
pub(crate) fn ls(args: impl IntoIterator<Item = OsString>) -> i32 {
    show(args, |args: LsArgs| {
        let (found, tensors) = args.cluster.list(args.namespace.as_deref(), args.timeout)?;
        let silent = warn_of_silent(&found);
        let lines = if args.json {
            vec![in_json(&tensors.iter().map(as_json).collect::<Vec<_>>())?]
        } else {
            lines(&tensors)
        };
        Ok((lines, silent == 0))
    })
}

/// Runs `rm` and returns the exit status. The first argument is the program's name.
pub(crate) fn rm(args: impl IntoIterator<Item = OsString>) -> i32 {
    show(args, |args: RmArgs| {
        let end = Instant::now() + args.timeout;
        let left = || end.saturating_duration_since(Instant::now());
        let namespace = &args.namespace;
        let (found, tensors) = args.cluster.list(Some(namespace.as_str()), args.timeout.min(LIST_TIMEOUT))?;
        if warn_of_silent(&found) > 0 {
            let why = "nothing was freed, because not every shard answers";
            return Err(Error::new(Kind::Connection, why));
        }
        let addresses: Vec<_> = found.shards.into_iter().map(|view| view.address).collect();
        if tensors.is_empty() {
            let listed = addresses.join(",");
            let why = format!("there is no namespace '{namespace}'; fastps ls {listed} lists them");
            return Err(Error::new(Kind::UnknownTensor, why));
        }
        let Credentials { token_file, .. } = &args.cluster.credentials;
        let (tls, token_file) = (args.cluster.credentials.tls(), token_file.clone());
        let options = ConnectOptions { timeout: left(), tls, token_file, ..ConnectOptions::default() };
        let client = Client::connect(&addresses, options)?;
        tensors.iter().try_for_each(|one| client.unregister(&one.spec.name, left()))?;
        let (count, bytes) = (tensors.len(), grouped(tensors.iter().map(bytes).sum()));
        let tensors = if count == 1 { "tensor" } else { "tensors" };
        Ok((vec![format!("freed namespace {namespace}: {count} {tensors}, {bytes} bytes of values")], true))
    })
}

impl Cluster {
    /// The shards, and the tensors of all namespaces or of one, by namespace and name.
    fn list(&self, namespace: Option<&str>, timeout: Duration) -> Result<(ClusterView, Vec<ListedTensor>)> {
        let prefix = namespace.map_or_else(String::new, |namespace| format!("{MARK}{namespace}/"));
        let (tls, token) = (self.credentials.tls(), self.credentials.token_file.as_deref());
        let (found, mut tensors) = with_addresses(self.addresses.clone(), |addresses| {
            list(addresses, &tls, token, timeout, &prefix)
        })?;
        tensors.sort_by(|a, b| parts(&a.spec.name).cmp(&parts(&b.spec.name)));
        Ok((found, tensors))
    }
}

/// Names the shards that do not answer on standard error. Returns their number.
fn warn_of_silent(found: &ClusterView) -> usize {
    let silent = found.shards.iter().filter_map(|view| Some((view, view.answer.as_ref().err()?)));
    let name =
        |shard: Option<u32>| shard.map_or_else(|| "a shard".to_owned(), |shard| format!("shard {shard}"));
    silent
        .map(|(view, error)| {
            let (shard, address) = (name(view.shard), &view.address);
            note(format_args!("warning: {shard} at {address} does not answer: {}", error.message));
        })
        .count()
}

/// The namespace and the name in it.
fn parts(name: &str) -> (Option<&str>, &str) {
    let parts = name.strip_prefix(MARK).and_then(|rest| rest.split_once('/'));
    parts.map_or((None, name), |(namespace, own)| (Some(namespace), own))
}

fn bytes(one: &ListedTensor) -> u64 {
    (one.spec.elements() * one.spec.dtype.size()) as u64
}

fn lines(tensors: &[ListedTensor]) -> Vec<String> {
    let titles = ["NAMESPACE", "TENSOR", "SHAPE", "DTYPE", "OPTIMIZER", "VERSION", "BYTES", "LAST CHANGE"];
    let mut rows = vec![titles.map(str::to_owned)];
    rows.extend(tensors.iter().map(|one| {
        let ListedTensor { spec, version, changed } = one;
        let (namespace, name) = parts(&spec.name);
        let dash = || "-".to_owned();
        let shape = spec.shape.iter().map(u64::to_string).collect::<Vec<_>>().join("x");
        [
            namespace.unwrap_or("-").to_owned(),
            name.to_owned(),
            if shape.is_empty() { "scalar".to_owned() } else { shape },
            spec.dtype.name().to_owned(),
            spec.optimizer.title().to_owned(),
            version.map_or_else(dash, grouped),
            grouped(bytes(one)),
            changed.map_or_else(dash, |ago| format!("{} ago", duration(ago.as_secs()))),
        ]
    }));
    table(&rows, 5)
}

/// A number with commas between the thousands.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let comma = |k: usize| k > 0 && (digits.len() - k).is_multiple_of(3);
    digits
        .chars()
        .enumerate()
        .flat_map(|(k, digit)| comma(k).then_some(',').into_iter().chain([digit]))
        .collect()
}

fn as_json(one: &ListedTensor) -> serde_json::Value {
    let ListedTensor { spec, version, changed } = one;
    let (namespace, name) = parts(&spec.name);
    json!({
        "namespace": namespace,
        "name": name,
        "shape": spec.shape,
        "dtype": spec.dtype.name(),
        "apply": spec.apply.name(),
        "group": spec.group.strip_prefix(&format!("{MARK}{}/", namespace.unwrap_or_default())).unwrap_or(&spec.group),
        "optimizer": optimizer(spec.optimizer),
        "version": version,
        "bytes": bytes(one),
        "changed_s_ago": changed.map(|ago| ago.as_secs_f64()),
    })
}

/// Name and settings as the arguments in Python.
fn optimizer(mut optimizer: Optimizer) -> Map<String, serde_json::Value> {
    let mut fields = Map::from_iter([("name".to_owned(), json!(optimizer.title()))]);
    for setting in optimizer.settings() {
        let value = match setting.value {
            Value::Number(value) => json!(value),
            Value::Flag(value) => json!(value),
            Value::EpsMode(mode) => json!(mode.name()),
        };
        fields.insert(setting.name.to_owned(), value);
    }
    if let (Some(first), Some(second)) = (fields.remove("beta1"), fields.remove("beta2")) {
        fields.insert("betas".to_owned(), json!([first, second]));
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use fastps_core::optim::{Adam, Sgd};

    #[test]
    fn the_arguments_are_consistent() {
        LsArgs::command().debug_assert();
        RmArgs::command().debug_assert();
        for (run, arguments) in [
            (ls as fn(Vec<OsString>) -> i32, &["x", "--run", "a", "--namespace", "a"][..]),
            (rm, &["x", "--run", "a", "--namespace", "a"]),
            (rm, &["x"]),
        ] {
            assert_eq!(run(arguments.iter().map(OsString::from).collect()), 2, "{arguments:?}");
        }
    }

    #[test]
    fn numbers_names_and_settings_are_those_of_python() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [parts("w"), parts("run:a/b/c"), parts("run:a")],
            [(None, "w"), (Some("a"), "b/c"), (None, "run:a")]
        );
        let adam = optimizer(Optimizer::Adam(Adam::default()));
        assert_eq!((&adam["name"], &adam["betas"]), (&json!("Adam"), &json!([0.9, 0.999])));
        assert_eq!(optimizer(Optimizer::Sgd(Sgd::default()))["nesterov"], json!(false));
    }
}
