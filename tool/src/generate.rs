//! `rpcrdma generate FOLDER`: rpcrdma(1), a page for each subcommand, and completions for bash, zsh and fish. For `make`.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::out::complain;

#[derive(clap::Args)]
pub struct Args {
    /// Where to: FOLDER/man1 and FOLDER/completions are made.
    folder: PathBuf,
}

pub fn run(args: &Args) -> ExitCode {
    match generate(&args.folder) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain!("rpcrdma generate: {}: {}", args.folder.display(), crate::words::reason(&error));
            ExitCode::FAILURE
        }
    }
}

fn generate(folder: &Path) -> io::Result<()> {
    let manuals = folder.join("man1");
    fs::create_dir_all(&manuals)?;
    let mut command = crate::Cli::command().disable_help_subcommand(true);
    command.build();
    fs::write(manuals.join("rpcrdma.1"), page(command.clone())?)?;
    for one in command.get_subcommands().filter(|one| !one.is_hide_set() && one.get_name() != "run") {
        let name = format!("rpcrdma-{}", one.get_name());
        fs::write(manuals.join(format!("{name}.1")), page(one.clone())?)?;
    }
    let completions = folder.join("completions");
    fs::create_dir_all(&completions)?;
    for (shell, name) in
        [(Shell::Bash, "rpcrdma.bash"), (Shell::Zsh, "_rpcrdma"), (Shell::Fish, "rpcrdma.fish")]
    {
        let mut file = File::create(completions.join(name))?;
        clap_complete::generate(shell, &mut offered(&crate::Cli::command()), "rpcrdma", &mut file);
    }
    Ok(())
}

/// What a shell offers of a command: what the help hides is hidden there too.
fn offered(command: &clap::Command) -> clap::Command {
    let mut offered = clap::Command::new(command.get_name().to_owned())
        .args(command.get_arguments().filter(|argument| !argument.is_hide_set()).cloned())
        .subcommands(command.get_subcommands().filter(|one| !one.is_hide_set()).map(offered));
    if let Some(about) = command.get_about() {
        offered = offered.about(about.clone());
    }
    if let Some(version) = command.get_version() {
        offered = offered.version(version.to_owned());
    }
    offered
}

/// The page of a command, with the sections that such pages have.
fn page(command: clap::Command) -> io::Result<Vec<u8>> {
    let name = command.get_display_name().unwrap_or(command.get_name()).replace(' ', "-");
    let page = clap_mangen::Man::new(command)
        .title(name.to_uppercase())
        .date(DATED.lines().find_map(|line| line.strip_prefix(".Dd ")).unwrap_or_default())
        .source(concat!("rpcrdma ", env!("CARGO_PKG_VERSION")))
        .manual("User Commands");
    let mut text = Vec::new();
    page.render(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    // The text after the options is notes, and the last of them is the exit status.
    let mut text =
        text.replace("\n.br\n\n.br\n", "\n.br\n").replace(".SH EXTRA\nExit status: ", ".SH EXIT STATUS\n");
    text = text.replace(".SH EXTRA", ".SH NOTES").replace("\n\nExit status: ", "\n.SH EXIT STATUS\n");
    text = text.replace("\n\n", "\n.PP\n");
    if !text.contains(".SH SEE ALSO") {
        text.push_str(".SH SEE ALSO\n");
        text.push_str(SEE);
    }
    Ok(text.into_bytes())
}

/// The page that describes `rpcrdma run` too; all pages have its date.
const DATED: &str = include_str!("../../docs/rpcrdma-run.1");

const SEE: &str = "\\fBrpcrdma\\fR(1), \\fBrpcrdma\\-run\\fR(1), \\fBrpcrdma.conf\\fR(5), \\fBrpcrdma\\-bindings\\fR(5), \
                   \\fBrpcrdma\\fR(7)\n";
