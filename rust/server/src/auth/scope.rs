//! The groups and namespaces that a principal may use.
//!
//! Tensors, groups, spaces and portions of a namespace have names that begin with `run:NAMESPACE/`. A
//! limited principal uses only tensors whose name and group are in the same namespace, or both in none.

use fastps_core::error::{Error, Kind, Result};
use fastps_core::text::is_hidden;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Mark of a namespace in the text of a scope.
const NAMESPACE: &str = "namespace:";
/// Start of the names of a namespace on the servers.
const RUN: &str = "run:";

/// The limits of a principal. As text: `*`, or names of groups and `namespace:NAME`, separated by commas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All groups and namespaces.
    Everything,
    /// Only these.
    Only {
        /// Names of groups outside namespaces.
        groups: Vec<Arc<str>>,
        /// Names of namespaces.
        namespaces: Vec<Arc<str>>,
    },
}

/// The namespace of a name on the servers; `None`: it is in none.
fn namespace(name: &str) -> Option<&str> {
    Some(name.strip_prefix(RUN)?.split_once('/')?.0)
}

/// Start of all names of a namespace.
pub(crate) fn prefix(namespace: &str) -> String {
    format!("{RUN}{namespace}/")
}

impl Scope {
    /// Returns whether a tensor of this name and group is within the limits.
    pub(crate) fn allows(&self, tensor: &str, group: &str) -> bool {
        let Self::Only { groups, namespaces } = self else { return true };
        match (namespace(tensor), namespace(group)) {
            (Some(one), Some(other)) => one == other && namespaces.iter().any(|own| **own == *one),
            (None, None) => groups.iter().any(|own| **own == *group),
            _ => false,
        }
    }

    /// Returns whether a group of this name is within the limits.
    pub(crate) fn allows_group(&self, group: &str) -> bool {
        let Self::Only { groups, namespaces } = self else { return true };
        match namespace(group) {
            Some(one) => namespaces.iter().any(|own| **own == *one),
            None => groups.iter().any(|own| **own == *group),
        }
    }

    /// Returns whether a name of portions is within the limits. They have no group: a group has the names
    /// that begin with its own and a slash.
    pub(crate) fn allows_portions(&self, name: &str) -> bool {
        let Self::Only { groups, namespaces } = self else { return true };
        match namespace(name) {
            Some(one) => namespaces.iter().any(|own| **own == *one),
            None => {
                groups.iter().any(|own| name.strip_prefix(&**own).is_some_and(|rest| rest.starts_with('/')))
            }
        }
    }

    /// Returns whether a space of this name may lie on a tensor of this name.
    pub(crate) fn allows_space(&self, space: &str, tensor: &str) -> bool {
        *self == Self::Everything || namespace(space) == namespace(tensor)
    }

    /// Returns whether there are no limits.
    pub(crate) fn is_everything(&self) -> bool {
        *self == Self::Everything
    }
}

impl FromStr for Scope {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "*" {
            return Ok(Self::Everything);
        }
        let (mut groups, mut namespaces) = (Vec::new(), Vec::new());
        for part in text.split(',') {
            let (list, name) = match part.strip_prefix(NAMESPACE) {
                Some(name) => (&mut namespaces, name),
                None => (&mut groups, part),
            };
            let odd = |c: char| c.is_whitespace() || is_hidden(c) || c == '*';
            let known = list.iter().any(|known: &Arc<str>| **known == *name);
            // A namespace ends at the first slash of a name.
            let cut = part.starts_with(NAMESPACE) && name.contains('/');
            if name.is_empty() || name.contains(odd) || known || cut {
                let why = "groups or namespaces that cannot be read";
                let expected =
                    "* alone, or different names of groups and namespace:NAME, separated by commas";
                return Err(Error::new(Kind::Config, why).expected(expected, format!("{text:?}")));
            }
            list.push(name.into());
        }
        Ok(Self::Only { groups, namespaces })
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Only { groups, namespaces } = self else { return f.write_str("*") };
        let groups = groups.iter().map(|name| format!("{name}"));
        let namespaces = namespaces.iter().map(|name| format!("{NAMESPACE}{name}"));
        f.write_str(&groups.chain(namespaces).collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(text: &str) -> Scope {
        let scope: Scope = text.parse().unwrap();
        assert_eq!(scope.to_string(), text);
        scope
    }

    #[test]
    fn a_scope_limits_groups_and_namespaces() {
        for (text, tensor, group, allowed) in [
            ("*", "run:x/w", "default", true),
            ("default", "w", "default", true),
            ("default,b", "w", "b", true),
            ("default", "w", "other", false),
            ("default", "run:x/w", "run:x/default", false),
            ("default", "run:x/w", "default", false),
            ("namespace:x", "run:x/w", "run:x/default", true),
            ("namespace:x", "run:x/w", "run:y/default", false),
            ("namespace:x", "run:y/w", "run:y/default", false),
            ("namespace:x", "run:xy/w", "run:xy/default", false),
            ("namespace:x", "w", "run:x/default", false),
            ("b,namespace:x", "w", "b", true),
        ] {
            assert_eq!(scope(text).allows(tensor, group), allowed, "{text} {tensor} {group}");
        }
    }

    #[test]
    fn names_of_portions_and_spaces_follow() {
        for (text, name, allowed) in [
            ("*", "train", true),
            ("default", "default/train", true),
            ("default", "defaults/train", false),
            ("default", "train", false),
            ("namespace:x", "run:x/train", true),
            ("namespace:x", "run:y/train", false),
            ("default", "run:default/train", false),
        ] {
            assert_eq!(scope(text).allows_portions(name), allowed, "{text} {name}");
        }
        assert!(scope("*").allows_space("run:x/s", "w"));
        assert!(scope("namespace:x").allows_space("run:x/s", "run:x/w"));
        assert!(!scope("namespace:x").allows_space("s", "run:x/w"));
        assert!(!scope("default").allows_space("run:x/s", "w"));
    }

    #[test]
    fn bad_scopes_are_refused() {
        for text in
            ["", ",", "a,,b", "a,a", "*,a", "a b", "namespace:", "namespace:x,namespace:x", "namespace:a/b"]
        {
            assert_eq!(text.parse::<Scope>().unwrap_err().kind, Kind::Config, "{text:?}");
        }
    }
}
