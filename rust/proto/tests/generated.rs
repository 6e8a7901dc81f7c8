//! The checked-in code is what `protos/` generates. `FASTPS_REGENERATE=1 cargo test -p fastps-proto` rewrites
//! it.

mod roles;

use protox::Compiler;
use std::path::{Path, PathBuf};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn generate(into: &Path) -> Outcome {
    let protos = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../protos");
    let compile = |comments| -> Result<Compiler, protox::Error> {
        let mut compiler = Compiler::new([&protos])?;
        compiler.include_source_info(comments).open_file("fastps/v1/fastps.proto")?;
        Ok(compiler)
    };
    let files = compile(true)?.file_descriptor_set();
    // Reflection needs no comments, which would treble the size, but all imports and options.
    let bare = compile(false)?.include_imports(true).encode_file_descriptor_set();
    std::fs::write(into.join("fastps.v1.bin"), bare)?;
    std::fs::write(into.join("roles.rs"), roles::generate(&compile(false)?.descriptor_pool())?)?;
    tonic_prost_build::configure()
        .bytes(".")
        // Rare, but part of each frequent message.
        .boxed(".fastps.v1.Header.table")
        .boxed(".fastps.v1.Header.vector")
        .boxed(".fastps.v1.Header.portion")
        .boxed(".fastps.v1.PartRefusal.refusal")
        // Secrets must not be logged: its `Debug` is written in `lib.rs`.
        .skip_debug([".fastps.v1.HelloRequest"])
        .emit_rerun_if_changed(false)
        .out_dir(into)
        .compile_fds(files)?;
    Ok(())
}

#[test]
fn checked_in_code_is_fresh() -> Outcome {
    let checked_in = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/generated");
    if std::env::var_os("FASTPS_REGENERATE").is_some_and(|v| v == "1") {
        return generate(&checked_in);
    }
    let fresh = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    generate(&fresh)?;
    for name in ["fastps.v1.rs", "fastps.v1.bin", "roles.rs"] {
        assert!(
            std::fs::read(fresh.join(name))? == std::fs::read(checked_in.join(name))?,
            "{name} is stale: run FASTPS_REGENERATE=1 cargo test -p fastps-proto"
        );
    }
    Ok(())
}
