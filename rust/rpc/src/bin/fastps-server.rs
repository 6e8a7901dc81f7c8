//! The standalone server; everything is in the library.

fn main() {
    std::process::exit(fastps_rpc::cli::run(std::env::args_os()));
}
