//! The commands as data: shells complete them, and the reference lists them.

use crate::{
    ServeArgs, certs, checkpoint, config, fork, history, new_cluster, owner, status, tensors, token, top,
};
use clap::{Arg, Command, CommandFactory};

/// Names, each with its help.
type Named = Vec<(String, String)>;

/// Names of an option, the name of its value, the values that it allows, and its help. The name of a value that
/// may be left out is in brackets, and a switch has none.
type Options = Vec<(Vec<String>, String, Vec<String>, String)>;

/// A command: its name, what it does, its arguments, options and subcommands.
pub type Described = (String, String, Named, Options, Named);

/// `serve`, or one of [`COMMANDS`](crate::COMMANDS), before its subcommands. Nothing for another name.
#[must_use]
pub fn described(name: &str) -> Vec<Described> {
    let Some(mut command) = parser(name) else { return Vec::new() };
    command.build();
    let whole = format!("fastps {name}");
    let under = subcommands(&command).map(|one| describe(format!("{whole} {}", one.get_name()), one));
    std::iter::once(describe(whole.clone(), &command)).chain(under).collect()
}

fn parser(name: &str) -> Option<Command> {
    Some(match name {
        "serve" => ServeArgs::command(),
        "certs" => certs::CertsArgs::command(),
        "checkpoint" => checkpoint::CheckpointArgs::command(),
        "cluster" => new_cluster::ClusterArgs::command(),
        "config" => config::ConfigArgs::command(),
        "fork" => fork::ForkArgs::command(),
        "history" => history::HistoryArgs::command(),
        "ls" => tensors::LsArgs::command(),
        "owner" => owner::OwnerArgs::command(),
        "rewind" => history::RewindArgs::command(),
        "rm" => tensors::RmArgs::command(),
        "status" => status::StatusArgs::command(),
        "token" => token::TokenArgs::command(),
        "top" => top::TopArgs::command(),
        _ => return None,
    })
}

fn subcommands(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|one| one.get_name() != "help")
}

fn describe(name: String, command: &Command) -> Described {
    let about = |one: &Command| one.get_about().map(ToString::to_string).unwrap_or_default();
    let arguments = command.get_positionals().map(|one| (value(one), help(one))).collect();
    let options = command.get_arguments().filter(|one| !one.is_positional()).map(option).collect();
    let words = subcommands(command).map(|one| (one.get_name().to_owned(), about(one))).collect();
    (name, about(command), arguments, options, words)
}

fn option(option: &Arg) -> (Vec<String>, String, Vec<String>, String) {
    let short = option.get_short().map(|one| format!("-{one}"));
    let long = option.get_long().map(|one| format!("--{one}"));
    let takes_value = option.get_action().takes_values();
    let may_lack = option.get_num_args().is_some_and(|count| count.min_values() == 0);
    let value = match (takes_value, may_lack) {
        (false, _) => String::new(),
        (true, false) => value(option),
        (true, true) => format!("[={}]", value(option)),
    };
    let choices = option.get_possible_values();
    let choices = choices.iter().filter(|_| takes_value).map(|one| one.get_name().to_owned()).collect();
    (short.into_iter().chain(long).collect(), value, choices, help(option))
}

fn value(argument: &Arg) -> String {
    argument.get_value_names().and_then(<[_]>::first).map(ToString::to_string).unwrap_or_default()
}

fn help(argument: &Arg) -> String {
    let text = argument.get_help().map(ToString::to_string).unwrap_or_default();
    let defaults = argument.get_default_values().join(",".as_ref());
    if !argument.get_action().takes_values() || defaults.is_empty() || argument.is_hide_default_value_set() {
        return text;
    }
    format!("{text} [default: {}]", defaults.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::COMMANDS;

    #[test]
    fn each_command_is_described() {
        assert!(COMMANDS.iter().all(|name| !described(name).is_empty()));
        assert_eq!(described("demo"), []);
        let checkpoint = described("checkpoint");
        let (name, _, arguments, options, _) = &checkpoint[1];
        assert_eq!((name.as_str(), &arguments[0].0[..]), ("fastps checkpoint save", "ADDRESSES"));
        let consistent = options.iter().find(|one| one.0 == ["--consistent"]).unwrap();
        assert_eq!(consistent.1, "[=GROUP]");
        let serve = described("serve").remove(0);
        let format = serve.3.iter().find(|one| one.0 == ["--log-format"]).unwrap();
        assert_eq!((&format.1[..], &format.2[..]), ("FORMAT", &["text".to_owned(), "json".to_owned()][..]));
    }
}
