//! `rpcrdma info`: says whether RPC over RDMA works here, how, and what prevents it. One report, printed as text or as JSON.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use clap::ValueHint;
use rpcrdma::config::{self, Source};
use rpcrdma::tool::{self, host};
use serde::Serialize;

use crate::out::{self, say};
use crate::words::shown;
use crate::{devices, library, programs};

#[derive(clap::Args)]
#[command(after_help = "The text can be pasted into a report of a problem as it is.\n\n\
                        Exit status: 0 there is no problem, 1 there is, 2 the command line was wrong. No rpcbind is a problem \
                        at HOST; without HOST it is not, for clients need none of their own.")]
pub struct Args {
    /// Says what would be used towards HOST, and what is registered there.
    #[arg(value_hint = ValueHint::Hostname)]
    host: Option<String>,
    /// Prints one JSON document instead of the text.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    system: System,
    library: Library,
    settings: Vec<Setting>,
    bindings: Vec<Bindings>,
    kinds: Vec<Kind>,
    devices: Vec<devices::Device>,
    towards: Option<Towards>,
    locked_memory: Locked,
    descriptors: Option<String>,
    rpcbind: Rpcbind,
    problems: Vec<String>,
}

#[derive(Serialize)]
struct System {
    kernel: String,
    distribution: Option<String>,
}

#[derive(Serialize)]
struct Library {
    version: Option<String>,
    path: Option<String>,
    /// The names in LD_PRELOAD that are this library's.
    preload: Vec<String>,
    /// Where the loader finds the library by its name.
    loader: Option<String>,
}

#[derive(Serialize)]
struct Setting {
    key: &'static str,
    value: String,
    /// "default", "environment", or FILE:LINE.
    source: String,
}

#[derive(Serialize)]
struct Bindings {
    file: String,
    programs: BTreeSet<u32>,
    procedures: usize,
}

/// A kind of device that is built in.
#[derive(Serialize)]
struct Kind {
    name: &'static str,
    title: &'static str,
    /// Why this process cannot use such a device.
    unusable: Option<String>,
    /// What a first connection would lack.
    lacks: Option<String>,
}

#[derive(Serialize)]
struct Towards {
    host: String,
    address: Option<SocketAddr>,
    /// The name of the device that would be used.
    used: Option<&'static str>,
    tried: Vec<Tried>,
}

#[derive(Serialize)]
struct Tried {
    name: &'static str,
    title: &'static str,
    /// Which device of that kind leads there.
    by: Option<String>,
    why_not: Option<String>,
}

#[derive(Serialize)]
struct Locked {
    limit: Option<usize>,
    /// How much of it the buffers of connections may take.
    buffers: Option<usize>,
    /// This process may lock more than its limit.
    privileged: bool,
}

#[derive(Serialize)]
struct Rpcbind {
    host: String,
    address: Option<SocketAddr>,
    why_not: Option<String>,
    registered: Vec<Registered>,
}

#[derive(Serialize)]
struct Registered {
    program: u32,
    name: Option<String>,
    netid: String,
    versions: BTreeSet<u32>,
}

pub fn run(args: &Args) -> ExitCode {
    let report = look(args.host.as_deref());
    if args.json {
        out::document(&report);
    } else {
        print(&report);
    }
    if report.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn look(to: Option<&str>) -> Report {
    let mut problems = Vec::new();
    let library = look_at_library(&mut problems);
    let set = config::report(library::environment());
    problems.extend(
        set.errors.iter().map(|error| format!("{error}; until that is fixed nothing goes over rdma")),
    );
    library::forget_name();
    // A process reads its settings once; if some are not understood, it uses the rest.
    let config = config::understood();

    let devices = devices::all();
    let kinds: Vec<Kind> = host::devices(config).into_iter().map(Kind::of).collect();
    for kind in kinds.iter().filter(|kind| kind.unusable.is_none()) {
        if let Some(why) = &kind.lacks {
            problems.push(format!("{} cannot be used: {why}", kind.title));
        }
    }
    if !devices.is_empty() && kinds.iter().all(|kind| kind.name != "verbs") {
        problems.push("there are RDMA devices, and the part for adapters is not built in".to_owned());
    }
    let rpcbind = look_at_rpcbind(to);
    if let (Some(_), Some(why)) = (to, &rpcbind.why_not) {
        problems.push(why.clone());
    }
    let towards = to.map(|name| look_towards(name, config, &mut problems));
    let (limit, lockable) = host::lockable();
    let set_in = |source| match source {
        Source::Default => "default".to_owned(),
        Source::Environment => "environment".to_owned(),
        Source::File { line } => format!("{}:{line}", set.file.0.display()),
    };
    let setting = |one: &config::Standing| Setting {
        key: one.key,
        value: one.value.clone(),
        source: set_in(one.source),
    };
    let bindings = |file: &config::BindingFile| Bindings {
        file: file.path.display().to_string(),
        programs: file.procedures.iter().map(|(program, ..)| *program).collect(),
        procedures: file.procedures.len(),
    };
    Report {
        version: tool::VERSION,
        system: system(),
        library,
        settings: set.settings.iter().map(setting).collect(),
        bindings: set.bindings.iter().map(bindings).collect(),
        kinds,
        devices,
        towards,
        locked_memory: Locked {
            limit,
            buffers: limit.map(|bytes| bytes / 2),
            privileged: lockable.is_none(),
        },
        descriptors: descriptors(),
        rpcbind,
        problems,
    }
}

impl Kind {
    fn of(device: host::Device) -> Kind {
        let text = |outcome: Result<(), tool::Error>| outcome.err().map(|error| error.to_string());
        Kind {
            name: device.name,
            title: device.title,
            unusable: text(device.usable),
            lacks: text(device.ready),
        }
    }
}

fn look_at_library(problems: &mut Vec<String>) -> Library {
    let found = library::found();
    let loader = library::known_to_loader().ok().flatten();
    match &found {
        Err(why) => problems.push(why.clone()),
        Ok((version, path)) if version != tool::VERSION => problems.push(format!(
            "{} is version {version}, and this command is {}: what it says holds for its own version; install both of one",
            path.display(),
            tool::VERSION
        )),
        Ok(_) => {}
    }
    let preload = library::preloads(&env::var_os("LD_PRELOAD").unwrap_or_default());
    for name in &preload {
        let there = if name.contains('/') { Path::new(name).exists() } else { loader.is_some() };
        if !there {
            problems
                .push(format!("LD_PRELOAD names {name}, which the loader does not find: it is passed over"));
        }
    }
    let (version, path) = found.ok().unzip();
    Library { version, path: path.map(|path| path.display().to_string()), preload, loader }
}

fn look_towards(name: &str, config: &config::Config, problems: &mut Vec<String>) -> Towards {
    let mut towards = Towards { host: name.to_owned(), address: None, used: None, tried: Vec::new() };
    // If a host has both, IPv4 comes first, as for netid rdma.
    let found = (name, 0).to_socket_addrs().map(|found| found.min_by_key(SocketAddr::is_ipv6));
    let Ok(Some(to)) = found else {
        // The code that asks rpcbind has already said why.
        return towards;
    };
    towards.address = Some(to);
    match host::candidates(to, config) {
        Ok(candidates) => {
            for one in candidates {
                let (by, why_not) = match one.leads {
                    Ok(by) => (Some(by), None),
                    Err(error) => (None, Some(error.to_string())),
                };
                if by.is_some() && towards.used.is_none() {
                    towards.used = Some(one.name);
                }
                towards.tried.push(Tried { name: one.name, title: one.title, by, why_not });
            }
            if towards.used.is_none() {
                problems.push(format!("no device leads to {name} that RPCRDMA_PROVIDER allows"));
            }
        }
        Err(error) => problems.push(error.to_string()),
    }
    towards
}

fn look_at_rpcbind(to: Option<&str>) -> Rpcbind {
    let timeout = Duration::from_secs(5);
    let asked = host::registered(to, false, timeout).or_else(|error| match error.kind() {
        tool::Kind::NoAddress => host::registered(to, true, timeout),
        _ => Err(error),
    });
    let host = to.unwrap_or("localhost").to_owned();
    match asked {
        Ok((address, rows)) => {
            let mut registered: Vec<Registered> = Vec::new();
            for row in rows.iter().filter(|row| NETIDS.contains(&row.netid.as_str())) {
                let same = |one: &&mut Registered| one.program == row.prog && one.netid == row.netid;
                match registered.iter_mut().find(same) {
                    Some(one) => drop(one.versions.insert(row.vers)),
                    None => registered.push(Registered {
                        program: row.prog,
                        name: programs::name(row.prog),
                        netid: row.netid.clone(),
                        versions: [row.vers].into(),
                    }),
                }
            }
            registered.sort_by(|a, b| (a.program, &a.netid).cmp(&(b.program, &b.netid)));
            Rpcbind { host, address: Some(address), why_not: None, registered }
        }
        Err(error) => {
            Rpcbind { host, address: None, why_not: Some(error.to_string()), registered: Vec::new() }
        }
    }
}

/// The netids that matter here.
const NETIDS: [&str; 3] = ["rdma", "rdma6", "tcp"];

fn system() -> System {
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    let release = read("/etc/os-release");
    let name = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    System {
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        distribution: name.map(|name| name.trim_matches('"').to_owned()),
    }
}

/// The soft limit, from /proc.
fn descriptors() -> Option<String> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next().map(str::to_owned)
}

fn print(report: &Report) {
    let line = |name: &str, text: &str| say!("{name:<15} {}", shown(text));
    let more = |text: &str| say!("{:<15} {}", "", shown(text));
    line("rpcrdma", report.version);
    let System { kernel, distribution } = &report.system;
    line("system", &format!("{}, Linux {kernel}", distribution.as_deref().unwrap_or("unknown")));
    match (&report.library.path, &report.library.version) {
        (Some(path), Some(version)) => line("library", &format!("{path}, version {version}")),
        _ => line("library", "none: see below"),
    }
    match &report.library.loader {
        Some(path) => more(&format!("by its name the loader finds {path}")),
        None => more("the loader does not find it by its name (ldconfig)"),
    }
    match report.library.preload.as_slice() {
        [] => more("LD_PRELOAD does not name it here"),
        names => more(&format!("LD_PRELOAD names {}", names.join(", "))),
    }
    for (at, one) in report.kinds.iter().enumerate() {
        let said = match (&one.unusable, &one.lacks) {
            (None, None) => "can be used".to_owned(),
            (None, Some(why)) | (Some(why), None) => why.clone(),
            (Some(why), Some(lacks)) => format!("{why}; {lacks}"),
        };
        line(if at == 0 { "kinds of device" } else { "" }, &format!("{} ({}): {said}", one.name, one.title));
    }
    if report.devices.is_empty() {
        line("devices", "none");
    }
    for device in &report.devices {
        line("device", &format!("{}, {}", device.name, device.kind));
        for port in &device.ports {
            let addresses: Vec<String> = port.addresses.iter().map(ToString::to_string).collect();
            let interfaces = port.interfaces.join(" ");
            let (number, state, layer) = (port.number, &port.state, &port.link_layer);
            more(&format!("port {number}: {state}, {layer}, {interfaces}: {}", addresses.join(" ")));
        }
    }
    if let Some(towards) = &report.towards {
        let address = towards.address.map_or("no address".to_owned(), |address| address.ip().to_string());
        line("towards", &format!("{} ({address}): {}", towards.host, towards.used.unwrap_or("nothing")));
        for one in &towards.tried {
            match (&one.by, &one.why_not) {
                (_, Some(why)) => more(&format!("{} ({}): no: {why}", one.name, one.title)),
                (Some(by), _) if !by.is_empty() => {
                    more(&format!("{} ({}): yes, by {by}", one.name, one.title))
                }
                _ => more(&format!("{} ({}): yes", one.name, one.title)),
            }
        }
    }
    let bytes = |n: Option<usize>| n.map_or("any number of bytes".to_owned(), |n| format!("{n} bytes"));
    let locked = &report.locked_memory;
    let more_rights = if locked.privileged { "; this process may lock more (CAP_IPC_LOCK)" } else { "" };
    let (limit, half) = (bytes(locked.limit), bytes(locked.buffers));
    line("locked memory", &format!("{limit}, half of it for buffers of adapters: {half}{more_rights}"));
    line("descriptors", report.descriptors.as_deref().unwrap_or("unknown"));
    match (&report.rpcbind.address, &report.rpcbind.why_not) {
        (Some(address), _) => line("rpcbind", &format!("answers at {address}")),
        (None, Some(why)) => line("rpcbind", &format!("{why} (servers need it, to be found by their name)")),
        (None, None) => line("rpcbind", "was not asked"),
    }
    for one in &report.rpcbind.registered {
        let versions: Vec<String> = one.versions.iter().map(u32::to_string).collect();
        more(&format!("{} {}: version {}", one.netid, programs::described(one.program), versions.join(", ")));
    }
    for (at, one) in report.settings.iter().enumerate() {
        let value = if one.value.is_empty() { "nothing" } else { &one.value };
        line(if at == 0 { "settings" } else { "" }, &format!("{} = {}  ({})", one.key, value, one.source));
    }
    if report.bindings.is_empty() {
        line("bindings", "no files; those of NFS are built in");
    }
    for one in &report.bindings {
        let programs: Vec<String> =
            one.programs.iter().map(|program| programs::described(*program)).collect();
        let text =
            format!("{}: procedures: {}, of program {}", one.file, one.procedures, programs.join(", "));
        line("bindings", &text);
    }
    if report.problems.is_empty() {
        line("problems", "none");
    }
    for problem in &report.problems {
        line("problem", problem);
    }
}
