//! `fastps fork`: serves a rewound data directory, without the workers that are named.

use crate::command::{note, run_to_status};
use clap::Parser;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::text::nearest;
use fastps_durable::{Rewound, checkpoint};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Serve a data directory that `fastps rewind` has written, so that workers train on from that moment. It is a new
/// cluster: clients of the old one are refused, and connect again. It keeps what it writes in DIR, and starts from
/// there the next time.
#[derive(Debug, Parser)]
#[command(name = "fastps fork")]
pub(crate) struct ForkArgs {
    /// The directory that fastps rewind has written.
    dir: PathBuf,
    /// Addresses to listen on, as of fastps serve: one per shard, or only the first one's.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:7070")]
    listen: String,
    /// Refuse the worker of this name, as --refuse-worker of fastps serve does; may be repeated.
    #[arg(long, value_name = "WORKER")]
    without: Vec<String>,
    /// More options of fastps serve, after --.
    #[arg(last = true, value_name = "OPTION")]
    options: Vec<OsString>,
}

/// Serves until the process is told to stop, and returns the exit status.
pub(crate) fn run(args: impl IntoIterator<Item = OsString>) -> i32 {
    run_to_status(args, |args: ForkArgs| match arguments(args) {
        Ok(arguments) => crate::run(arguments),
        Err(error) => crate::command::failed(&error),
    })
}

/// The arguments of `fastps serve`.
fn arguments(args: ForkArgs) -> Result<Vec<OsString>> {
    let ForkArgs { dir, listen, without, options } = args;
    let rewound = Rewound::read(&dir)?.ok_or_else(|| not_rewound(&dir))?;
    for worker in without.iter().filter(|worker| !rewound.workers.contains(worker.as_str())) {
        let near = nearest(worker, rewound.workers.iter().map(AsRef::as_ref));
        let near = near.map_or(String::new(), |near| format!("; did you mean {near:?}?"));
        let from = rewound.from.display();
        note(format_args!(
            "warning: no worker {worker:?} is known in {from}: it is refused all the same{near}"
        ));
    }
    let given = |option: &str| {
        let with = format!("{option}=");
        options.iter().filter_map(|one| one.to_str()).any(|one| one == option || one.starts_with(&with))
    };
    let mut arguments = vec!["fastps fork".into(), "--data-dir".into(), dir.clone().into_os_string()];
    arguments.extend(["--listen".into(), listen.into()]);
    let is_set = |variable: &str| std::env::var_os(variable).is_some();
    if !["--shards", "--cluster", "--config"].into_iter().any(given)
        && !["FASTPS_SHARDS", "FASTPS_CLUSTER", "FASTPS_CONFIG"].into_iter().any(is_set)
    {
        let shards = checkpoint::list(&dir)?.len();
        arguments.extend(["--shards".into(), shards.to_string().into()]);
    }
    arguments.extend(without.into_iter().map(|worker| format!("--refuse-worker={worker}").into()));
    arguments.extend(options);
    Ok(arguments)
}

fn not_rewound(dir: &Path) -> Error {
    let why = format!(
        "{} was not written by fastps rewind: it would go on as the cluster that it is",
        dir.display()
    );
    Error::new(Kind::Config, why).expected(
        "a directory of `fastps rewind`, or `fastps serve --data-dir DIR` to start its own cluster again",
        dir.display(),
    )
}
