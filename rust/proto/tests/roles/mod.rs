//! Writes `roles.rs` from the options of the proto, which prost drops.

use protox::prost_reflect::{DescriptorPool, DynamicMessage, ExtensionDescriptor};
use std::fmt::Write;

type Failed = Box<dyn std::error::Error>;

/// The code: an implementation per request, and a match of all frame kinds. Fails for a call, or a kind,
/// without a role.
pub(crate) fn generate(pool: &DescriptorPool) -> Result<String, Failed> {
    let extension = |name: &str| pool.get_extension_by_name(name).ok_or_else(|| format!("no option {name}"));
    let (of_call, of_kind) = (extension("fastps.v1.least_role")?, extension("fastps.v1.least_role_of_kind")?);
    let mut code = String::from(HEADER);
    for service in pool.services() {
        for call in service.methods() {
            let role = role(&call.options(), &of_call).ok_or_else(|| without(call.full_name()))?;
            if role == "Unspecified" {
                return Err(without(call.full_name()));
            }
            let request = call.input();
            writeln!(code, "\n/// {}", call.full_name())?;
            writeln!(code, "impl NeedsRole for v1::{} {{", request.name())?;
            writeln!(code, "    const ROLE: v1::Role = v1::Role::{role};\n}}")?;
        }
    }
    let kinds = pool.get_enum_by_name("fastps.v1.Kind").ok_or("no enum Kind")?;
    code.push_str(MATCH);
    for kind in kinds.values() {
        let role = role(&kind.options(), &of_kind).ok_or_else(|| without(kind.full_name()))?;
        writeln!(code, "        v1::Kind::{} => v1::Role::{role},", camel(kind.name(), "KIND_"))?;
    }
    code.push_str("    }\n}\n");
    Ok(code)
}

const HEADER: &str = "// Generated from the options of protos/fastps/v1/fastps.proto.

use crate::v1;

/// A request of a call, which needs a role.
pub trait NeedsRole {
    /// The least role that may make the call.
    const ROLE: v1::Role;
}
";

const MATCH: &str = "
/// The least role that may send a frame of this kind; unspecified: no client sends it.
pub const fn role_of(kind: v1::Kind) -> v1::Role {
    match kind {
";

/// The role in an option, as Rust names it.
fn role(options: &DynamicMessage, option: &ExtensionDescriptor) -> Option<String> {
    if !options.has_extension(option) {
        return None;
    }
    let number = options.get_extension(option).as_enum_number()?;
    let roles = option.kind().as_enum()?.clone();
    Some(camel(roles.get_value(number)?.name(), "ROLE_"))
}

fn without(name: &str) -> Failed {
    format!("{name} has no role: protos/fastps/v1/fastps.proto").into()
}

/// `PULL_STATE` without its prefix as `PullState`.
fn camel(name: &str, prefix: &str) -> String {
    let words = name.strip_prefix(prefix).unwrap_or(name).split('_');
    words.map(|word| format!("{}{}", &word[..1], word[1..].to_lowercase())).collect()
}

#[test]
fn a_call_without_a_role_is_refused() {
    let proto = |option: &str| {
        format!(
            "syntax = 'proto3'; package fastps.v1; import 'google/protobuf/descriptor.proto';
             enum Role {{ ROLE_UNSPECIFIED = 0; ROLE_READER = 1; }}
             extend google.protobuf.MethodOptions {{ optional Role least_role = 50001; }}
             extend google.protobuf.EnumValueOptions {{ optional Role least_role_of_kind = 50002; }}
             message Ask {{}} message Answer {{}}
             enum Kind {{ KIND_NONE = 0 [(least_role_of_kind) = ROLE_UNSPECIFIED]; }}
             service Control {{ rpc Call(Ask) returns (Answer) {{ {option} }} }}"
        )
    };
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("roles");
    std::fs::create_dir_all(&folder).unwrap();
    for (option, fine) in [
        ("option (least_role) = ROLE_READER;", true),
        ("option (least_role) = ROLE_UNSPECIFIED;", false),
        ("", false),
    ] {
        std::fs::write(folder.join("roles.proto"), proto(option)).unwrap();
        let mut compiler = protox::Compiler::new([&folder]).unwrap();
        let code = generate(&compiler.open_file("roles.proto").unwrap().descriptor_pool());
        assert_eq!(code.as_ref().map_err(ToString::to_string).is_ok(), fine, "{option}");
        if let Ok(code) = code {
            assert!(code.contains("impl NeedsRole for v1::Ask") && code.contains("v1::Role::Reader"));
        }
    }
}
