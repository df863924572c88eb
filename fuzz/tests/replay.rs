//! Runs each input of the corpora once: defects that were found before must not be found again.

use std::fs;
use std::path::Path;

#[test]
fn the_corpora_pass() {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (name, run) in rpcrdma_fuzz::TARGETS {
        let mut inputs = 0;
        for entry in fs::read_dir(corpora.join(name)).expect("each target has a corpus") {
            let path = entry.expect("an entry").path();
            let input = fs::read(&path).expect("an input");
            if let Err(panic) = std::panic::catch_unwind(|| run(&input)) {
                eprintln!("{} fails", path.display());
                std::panic::resume_unwind(panic);
            }
            inputs += 1;
        }
        assert!(inputs > 0, "{name} has an empty corpus");
    }
}
