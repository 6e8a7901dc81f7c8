#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fastps_transport::fuzzing::message(bytes));
