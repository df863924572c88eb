//! `rpcrdma generate FOLDER`: rpcrdma(1), a page for each subcommand, and completions for bash, zsh and fish. For `make`.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;

#[derive(clap::Args)]
pub struct Args {
    /// Where to: FOLDER/man1 and FOLDER/completions are made.
    folder: PathBuf,
}

pub fn run(args: &Args) -> ExitCode {
    match generate(&args.folder) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rpcrdma generate: {}: {error}", args.folder.display());
            ExitCode::FAILURE
        }
    }
}

fn generate(folder: &Path) -> io::Result<()> {
    let manuals = folder.join("man1");
    fs::create_dir_all(&manuals)?;
    clap_mangen::generate_to(crate::Cli::command(), &manuals)?;
    let completions = folder.join("completions");
    fs::create_dir_all(&completions)?;
    for (shell, name) in
        [(Shell::Bash, "rpcrdma.bash"), (Shell::Zsh, "_rpcrdma"), (Shell::Fish, "rpcrdma.fish")]
    {
        let mut file = File::create(completions.join(name))?;
        clap_complete::generate(shell, &mut crate::Cli::command(), "rpcrdma", &mut file);
    }
    Ok(())
}
