#!/usr/bin/env python3
"""Compiles the NEON leaf operations of rust/core/src/memory/cell.rs and looks at the instructions.

Without Rust's library for AArch64 the crate cannot be built for it. The leaf operations need no library:
their macro and its NEON call are taken out of the file as they stand, and compiled alone. They are compiled,
not run. Where that library is installed, the whole core is checked as well.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

TARGET = "aarch64-unknown-linux-gnu"
SOURCE = Path("rust/core/src/memory/cell.rs").read_text()
STUB = """
#![feature(no_core, lang_items, rustc_attrs, repr_simd, decl_macro, auto_traits)]
#![allow(internal_features, missing_docs, non_camel_case_types, dead_code)]
#![crate_type = "lib"]
#![no_core]
#[lang = "pointee_sized"] pub trait PointeeSized {}
#[lang = "meta_sized"] pub trait MetaSized: PointeeSized {}
#[lang = "sized"] pub trait Sized: MetaSized {}
#[lang = "copy"] pub trait Copy {}
#[lang = "freeze"] pub unsafe auto trait Freeze {}
impl<T: PointeeSized> Copy for *const T {}
impl<T: PointeeSized> Copy for *mut T {}
impl Copy for f32 {}
impl<T: Copy, const N: usize> Copy for [T; N] {}
impl Copy for float32x4_t {}
#[rustc_builtin_macro] pub macro asm($($t:tt)*) {}
#[repr(simd)] pub struct float32x4_t([f32; 4]);
"""
USES = """
#[unsafe(no_mangle)] #[target_feature(enable = "neon")]
pub unsafe fn copy_vector(from: *const f32, to: *mut f32) { unsafe { store_q(to, load_q(from)) } }
"""


def part(pattern: str) -> str:
    found = re.search(pattern, SOURCE, re.MULTILINE | re.DOTALL)
    if not found:
        sys.exit(f"cell.rs has no {pattern!r} any more: bring .ci/neon up to date")
    return found[0]


macro = part(r"^macro_rules! leaf \{.*?^\}")
call = part(r"^    leaf!\(\s*load_q,.*?\);")
folder = Path(os.environ["CARGO_TARGET_DIR"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "neon.rs").write_text(STUB + macro + "\n" + call + USES)
query = ["rustc", "--print=target-libdir", f"--target={TARGET}"]
library = subprocess.run(query, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
if Path(library).is_dir():
    check = ["cargo", "check", "--locked", "--quiet", f"--target={TARGET}", "-p", "fastps-core"]
    subprocess.run(check, check=True)
command = ["rustc", "--edition=2024", f"--target={TARGET}", "-O", "--emit=asm"]
environment = os.environ | {"RUSTC_BOOTSTRAP": "1"}
# The stub stands in for parts of Rust's library that belong to one compiler: a newer one may want others.
(folder / "stub.rs").write_text(STUB)
if subprocess.run([*command, "stub.rs"], cwd=folder, env=environment, capture_output=True).returncode:
    print("NEON leaf operations: not compiled, this compiler does not take the stub of its library")
    sys.exit()
subprocess.run([*command, "neon.rs"], cwd=folder, env=environment, check=True)
text = (folder / "neon.s").read_text()
for instruction in (r"ld1\s+\{ ?v\d+\.4s ?\}, \[x0\]", r"st1\s+\{ ?v\d+\.4s ?\}, \[x1\]"):
    if not re.search(instruction, text):
        sys.exit(f"no {instruction} in {folder}/neon.s")
print("NEON leaf operations: compiled, not run")
