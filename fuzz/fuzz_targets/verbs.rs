#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| rpcrdma_fuzz::verbs::run(data));
