//! The standalone server; everything is in the library.

fn main() {
    std::process::exit(fastps_cli::run(std::env::args_os()));
}
