//! The settings of a server: the command line before `FASTPS_...` variables, before the file of `--config`,
//! before the defaults. `fastps config` shows where each one comes from, and checks a file.

mod file;
mod show;

use crate::ServeArgs;
use crate::command::{failed, refuse};
use crate::log::last_line;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use fastps_core::error::Result;
use file::ConfigFile;
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

/// Settings that were read.
#[derive(Debug)]
struct Settings {
    /// Without the file.
    given: ArgMatches,
    all: ArgMatches,
    file: Option<ConfigFile>,
}

/// Why there are no settings.
enum Refused {
    /// By clap: also for `--help`.
    Usage(clap::Error),
    File(fastps_core::error::Error),
}

impl Refused {
    /// Explains it, and returns the exit status.
    fn tell(self, is_json: bool) -> i32 {
        let text = match self {
            // Also help, and text for people, with colours.
            Self::Usage(error) if !is_json || !error.use_stderr() => return refuse(&error),
            Self::Usage(error) => error.to_string().trim_start_matches("error: ").trim_end().to_owned(),
            Self::File(error) => error.to_string(),
        };
        let _ = std::io::stderr().write_all(last_line(is_json, &text).as_bytes());
        2
    }

    /// The reason in one line.
    fn reason(&self) -> String {
        let text = match self {
            Self::Usage(error) => error.to_string(),
            Self::File(error) => error.to_string(),
        };
        text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
    }
}

/// The settings with which a server has started.
#[derive(Debug)]
pub(crate) struct AtStart {
    args: Vec<OsString>,
    settings: Settings,
}

impl AtStart {
    /// Returns whether some may come from a file.
    pub(crate) fn has_file(&self) -> bool {
        self.settings.file.is_some()
    }

    /// Reads the file again, and reports settings that the next start would change, or that would prevent it.
    pub(crate) fn compare(&self) {
        if !self.has_file() {
            return;
        }
        let now = match read(self.args.clone()) {
            Ok(settings) => show::values(&settings),
            Err(refused) => {
                return tracing::error!(error = %refused.reason(), "the next start would fail");
            }
        };
        let before = show::values(&self.settings);
        let changed: Vec<_> = now.into_iter().filter(|value| !before.contains(value)).collect();
        if !changed.is_empty() {
            tracing::warn!(settings = %changed.join("; "), "changed settings take effect at the next start");
        }
    }
}

/// The arguments of a server; the exit status if there are none. The first argument is the program's name.
pub(crate) fn arguments(args: Vec<OsString>, is_json: bool) -> Result<(ServeArgs, AtStart), i32> {
    let settings = read(args.clone()).map_err(|refused| refused.tell(is_json))?;
    let found = ServeArgs::from_arg_matches(&settings.all);
    let found = found.map_err(|error| Refused::Usage(error).tell(is_json))?;
    Ok((found, AtStart { args, settings }))
}

/// Returns whether the log is JSON, as far as settings tell that may be wrong.
pub(crate) fn wants_json(args: &[OsString]) -> bool {
    let given = |option: &str, variable: &str| {
        let with = format!("{option}=");
        let mut found = std::env::var(variable).ok();
        let mut args = args.iter().filter_map(|arg| arg.to_str());
        while let Some(arg) = args.next() {
            let value = if arg == option { args.next() } else { arg.strip_prefix(&with) };
            found = value.map(str::to_owned).or(found);
        }
        found
    };
    if let Some(format) = given("--log-format", "FASTPS_LOG_FORMAT") {
        return format == "json";
    }
    let text = given("--config", "FASTPS_CONFIG").and_then(|file| std::fs::read_to_string(file).ok());
    let is_wanted = |(key, value): (&str, &str)| {
        key.trim() == "log-format" && value.trim().trim_matches(['"', '\'']) == "json"
    };
    text.is_some_and(|text| text.lines().filter_map(|line| line.split_once('=')).any(is_wanted))
}

fn read(args: Vec<OsString>) -> Result<Settings, Refused> {
    let command = ServeArgs::command();
    let given = command.clone().try_get_matches_from(&args).map_err(Refused::Usage)?;
    let Some(path) = given.get_one::<PathBuf>("config") else {
        return Ok(Settings { all: given.clone(), given, file: None });
    };
    let file = ConfigFile::read(path, &command).map_err(Refused::File)?;
    let more: Vec<_> = file.options(&given).collect();
    let all = command.try_get_matches_from(args.into_iter().chain(more)).map_err(Refused::Usage)?;
    Ok(Settings { given, all, file: Some(file) })
}

/// Show the settings of a server, or check a configuration file.
#[derive(Debug, Parser)]
#[command(name = "fastps config")]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Print every setting with its origin, as a configuration file.
    Show {
        /// Options of fastps serve, such as --config FILE.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTION")]
        options: Vec<OsString>,
    },
    /// Check a configuration file.
    Check {
        /// The file (TOML).
        file: PathBuf,
    },
}

/// Runs `config` and returns the exit status. The first argument is the program's name.
pub(crate) fn run(args: impl IntoIterator<Item = OsString>) -> i32 {
    let command = match ConfigArgs::try_parse_from(args) {
        Ok(args) => args.command,
        Err(error) => return Refused::Usage(error).tell(false),
    };
    let text = match command {
        ConfigCommand::Show { options } => {
            let args = std::iter::once(OsString::from("fastps serve")).chain(options).collect();
            match read(args) {
                Ok(settings) => show::text(&settings),
                Err(refused) => return refused.tell(false),
            }
        }
        ConfigCommand::Check { file } => match ConfigFile::read(&file, &ServeArgs::command()) {
            Ok(found) => format!("{}: {} settings, all valid\n", file.display(), found.settings.len()),
            Err(error) => {
                return failed(&error);
            }
        },
    };
    let mut out = std::io::stdout().lock();
    // The reader may be gone.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &str, args: &[&str]) -> Result<String, String> {
        let name = format!("fastps config {} {}.toml", std::process::id(), text.len() + args.len());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, text).unwrap();
        let config = ["x".into(), "--config".into(), path.clone().into_os_string()];
        let read = read(config.into_iter().chain(args.iter().map(OsString::from)).collect());
        std::fs::remove_file(&path).unwrap();
        let place = path.display().to_string();
        match read {
            Ok(settings) => Ok(show::text(&settings).replace(&place, "FILE")),
            Err(Refused::File(error)) => Err(error.to_string().replace(&place, "FILE")),
            Err(Refused::Usage(error)) => Err(error.to_string()),
        }
    }

    #[test]
    fn each_setting_has_its_origin() {
        let text = "shards = 3\nlisten = ['127.0.0.1:0', 'localhost:1']\nmemory-limit = '1GiB'\nspin-us = 7\naccept-loss = true\nkeep-for = 0.5\n";
        let shown = settings(text, &["--spin-us", "9"]).unwrap();
        let lines: Vec<String> =
            shown.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        for line in [
            "shards = 3 # FILE:1",
            r#"listen = ["127.0.0.1:0", "localhost:1"] # FILE:2"#,
            r#"memory-limit = "1GiB" # FILE:3"#,
            "spin-us = 9 # --spin-us",
            "accept-loss = true # FILE:5",
            "keep-for = 0.5 # FILE:6",
            "lease-ms = 10000 # default",
            "local = false # default",
            "# data-dir is not set",
        ] {
            assert!(lines.iter().any(|one| one == line), "{line}\n{shown}");
        }
        let again = settings(&shown, &[]).unwrap();
        assert_eq!(again.matches("# FILE:").count(), shown.matches("  # ").count(), "{again}");
    }

    #[test]
    fn mistakes_name_file_line_and_key() {
        for (text, error) in [
            (
                "\nsharts = 2",
                "FILE:2: there is no such key: expected an option of fastps serve, such as \"shards\", got \"sharts\"",
            ),
            ("config = 'x'", "FILE:1: there is no such key"),
            ("[server]\nshards = 1", "FILE:1: there is no such key"),
            (
                "shards = 'two'",
                "FILE:1: shards has the wrong type: expected a whole number, got the string \"two\"",
            ),
            (
                "shards = 1.5",
                "FILE:1: shards has the wrong type: expected a whole number, got the number 1.5",
            ),
            ("data-dir = 3", "FILE:1: data-dir has the wrong type: expected a string, got the number 3"),
            (
                "local = 'yes'",
                "FILE:1: local has the wrong type: expected true or false, got the string \"yes\"",
            ),
            ("listen = [1]", "FILE:1: listen has the wrong type: expected a list of strings, got a list"),
            ("shards = -1", "FILE:1: invalid value '-1' for '--shards <SHARDS>'"),
            ("memory-limit = '4 apples'", "FILE:1: invalid value '4 apples' for '--memory-limit"),
            ("keep = 1\n\nkeep = 2", "FILE:3: duplicate key"),
            ("keep = ", "FILE:1: "),
        ] {
            let refused = settings(text, &[]).unwrap_err();
            assert!(refused.starts_with(error), "{text}: {refused}");
        }
        assert!(matches!(
            arguments(vec!["x".into(), "--config".into(), "/no such file".into()], false),
            Err(2)
        ));
    }
}
