//! `rpcrdma info`: whether RPC over RDMA will work here, and how; what is in the way, and what helps.
//!
//! Looks and changes nothing. What is said of a problem are the library's own words, where it has some for it.

use std::env;
use std::fs;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use rpcrdma::config::{self, FILE, Origin};
use rpcrdma::provider::DEVICES;
use rpcrdma::tool::VERSION;
use rpcrdma::tool::host::{Row, allows, local_addresses, lockable, registered, shares_memory};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use crate::programs::Programs;

const NAME: &str = "librpcrdma.so.0";

#[derive(clap::Args)]
#[command(after_help = "What it prints is what a report of a defect should have.\n\n\
                        Exit status: 0 nothing is in the way, 1 something is, 2 for a wrong command line.")]
pub struct Args {
    /// A server that is to be reached. Its rpcbind is asked, in place of this machine's.
    host: Option<String>,
    /// Prints one JSON document.
    #[arg(long)]
    json: bool,
}

/// All that is said.
#[derive(Serialize)]
struct Report {
    version: &'static str,
    system: String,
    library: Library,
    devices: Vec<Device>,
    adapters: Vec<Adapter>,
    locked_memory: LockedMemory,
    descriptors: Option<u64>,
    host: Host,
    settings: Vec<Setting>,
    bindings: Vec<Bindings>,
    problems: Vec<String>,
}

/// The library that `rpcrdma-run` would load.
#[derive(Serialize)]
struct Library {
    file: Option<PathBuf>,
    /// As the file itself says.
    version: Option<String>,
    /// Whether the loader finds it by its name alone, as a linked program needs it.
    known_to_loader: bool,
    preload: Option<String>,
}

/// A kind of device of the library's.
#[derive(Serialize)]
struct Device {
    name: &'static str,
    title: &'static str,
    /// Why not, where it is not used.
    unusable: Option<String>,
}

/// A port of an RDMA device.
#[derive(Serialize)]
struct Adapter {
    device: String,
    port: String,
    link: String,
    state: String,
    interface: Option<String>,
    addresses: Vec<IpAddr>,
}

#[derive(Serialize)]
struct LockedMemory {
    /// Bytes; `null`: as many as there are.
    limit: Option<u64>,
    /// What connections over adapters may have of it.
    used_at_most: Option<u64>,
}

#[derive(Serialize)]
struct Host {
    name: String,
    /// The interface that leads there, and the address that this machine has towards it.
    from: Option<IpAddr>,
    interface: Option<String>,
    rpcbind: bool,
    /// Programs on netid rdma or rdma6.
    rdma: Vec<String>,
    /// Programs that are on tcp only.
    tcp_only: Vec<String>,
}

#[derive(Serialize)]
struct Setting {
    key: &'static str,
    value: String,
    from: String,
}

#[derive(Serialize)]
struct Bindings {
    file: PathBuf,
    wrong: Vec<String>,
}

pub fn run(args: &Args) -> ExitCode {
    let report = look(args.host.as_deref());
    if args.json {
        match serde_json::to_string_pretty(&report) {
            Ok(text) => println!("{text}"),
            Err(error) => {
                eprintln!("rpcrdma info: {error}");
                return ExitCode::FAILURE;
            }
        }
    } else {
        print(&report);
    }
    if report.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn look(host: Option<&str>) -> Report {
    let mut problems = Vec::new();
    let library = library(&mut problems);
    problems.extend(config::check().iter().map(|error| error.text().to_owned()));
    let devices = devices();
    let adapters = adapters(Path::new("/sys/class/infiniband"));
    let limit = getrlimit(Resource::Memlock).current;
    let most = lockable().map(|bytes| bytes as u64 / 2);
    if !adapters.is_empty() && most.is_some_and(|most| most < LITTLE) {
        problems.push(format!(
            "{} bytes may be locked in memory, of which connections over adapters get half: a connection takes about \
             400 KiB; ulimit -l or LimitMEMLOCK= gives more",
            limit.unwrap_or(u64::MAX)
        ));
    }
    let descriptors = getrlimit(Resource::Nofile).current;
    if descriptors.is_some_and(|most| most < 256) {
        problems.push(format!(
            "{} descriptors at most: ulimit -n or LimitNOFILE= gives more",
            descriptors.unwrap_or(0)
        ));
    }
    let host = ask(host, &mut problems);
    let origin = |origin| match origin {
        Origin::Default => "default".to_owned(),
        Origin::Line(number) => format!("{FILE}:{number}"),
        Origin::Environment => "environment".to_owned(),
    };
    let settings = config::in_force().into_iter().map(|row| Setting {
        key: row.key,
        value: row.value,
        from: origin(row.origin),
    });
    let bindings = config::binding_files()
        .into_iter()
        .map(|(file, wrong)| Bindings { file, wrong: wrong.iter().map(ToString::to_string).collect() });
    Report {
        version: VERSION,
        system: system(),
        library,
        devices,
        adapters,
        locked_memory: LockedMemory { limit, used_at_most: most },
        descriptors,
        host,
        settings: settings.collect(),
        bindings: bindings.collect(),
        problems,
    }
}

/// Half of what a connection over an adapter takes with few credits.
const LITTLE: u64 = 400 << 10;

fn system() -> String {
    let name = rustix::system::uname();
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let pretty = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME=")).unwrap_or("unknown");
    let [kernel, machine] = [name.release(), name.machine()].map(|word| word.to_string_lossy().into_owned());
    format!("{}, Linux {kernel}, {machine}", pretty.trim_matches('"'))
}

/// What `rpcrdma-run` says of the library: it has the rule for which one it is.
fn library(problems: &mut Vec<String>) -> Library {
    let beside = env::current_exe().ok().and_then(|path| Some(path.parent()?.join("rpcrdma-run")));
    let program = beside.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from("rpcrdma-run"));
    let (mut version, mut file) = (None, None);
    match Command::new(&program).arg("--version").output() {
        Err(error) => {
            problems.push(format!("{}, which puts the library into programs: {error}", program.display()))
        }
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let mut lines = text.lines();
            version = lines.next().and_then(|line| line.strip_prefix("rpcrdma-run ")).map(str::to_owned);
            file = lines.next().map(PathBuf::from);
        }
        Ok(output) => problems.push(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
    if let Some(other) = version.as_deref().filter(|version| *version != VERSION) {
        problems.push(format!("the library is of version {other}, and this command of {VERSION}"));
    }
    let cache =
        ["/sbin/ldconfig", "ldconfig"].iter().find_map(|name| Command::new(name).arg("-p").output().ok());
    let known = cache.is_some_and(|output| String::from_utf8_lossy(&output.stdout).contains(NAME));
    Library { file, version, known_to_loader: known, preload: env::var("LD_PRELOAD").ok() }
}

fn devices() -> Vec<Device> {
    let told = |device: &&dyn rpcrdma::provider::Device| {
        let traits = device.traits();
        let config = config::understood();
        let unusable = match device.usable(false) {
            Err(error) => Some(error.text().to_owned()),
            Ok(()) if !allows(config, *device) => Some("the setting provider names another one".into()),
            Ok(()) if traits.name == "local" => {
                shares_memory().err().map(|error| format!("memory cannot be shared: {error}"))
            }
            Ok(()) => None,
        };
        Device { name: traits.name, title: traits.title, unusable }
    };
    DEVICES.iter().map(told).collect()
}

/// What lies in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

/// The ports of the RDMA devices that the kernel has.
fn adapters(root: &Path) -> Vec<Adapter> {
    let word = |path: PathBuf| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let mut found = Vec::new();
    for device in names(root) {
        let ports = root.join(&device).join("ports");
        for port in names(&ports) {
            let at = ports.join(&port);
            // "4: ACTIVE"
            let state = word(at.join("state"));
            let interface = Some(word(at.join("gid_attrs/ndevs/0"))).filter(|name| !name.is_empty());
            let addresses = interface.as_deref().map(addresses_of).unwrap_or_default();
            found.push(Adapter {
                device: device.clone(),
                port,
                link: word(at.join("link_layer")),
                state: state.rsplit(' ').next().unwrap_or_default().to_owned(),
                interface,
                addresses,
            });
        }
    }
    found
}

fn addresses_of(interface: &str) -> Vec<IpAddr> {
    local_addresses(Some(interface)).iter().map(SocketAddr::ip).collect()
}

/// What rpcbind at the host lists, and how this machine reaches it.
fn ask(host: Option<&str>, problems: &mut Vec<String>) -> Host {
    let name = host.unwrap_or("localhost").to_owned();
    let from =
        (name.as_str(), 111u16).to_socket_addrs().ok().and_then(|mut found| found.next()).and_then(|at| {
            let any: IpAddr = if at.is_ipv4() { [0, 0, 0, 0].into() } else { [0u16; 8].into() };
            // Of a datagram socket that is only connected nothing is sent: the kernel chooses the way.
            let socket = UdpSocket::bind((any, 0)).ok()?;
            socket.connect(at).ok()?;
            Some(socket.local_addr().ok()?.ip())
        });
    let interfaces = names(Path::new("/sys/class/net"));
    let interface =
        from.and_then(|from| interfaces.into_iter().find(|name| addresses_of(name).contains(&from)));
    let mut told = Host { name, from, interface, rpcbind: false, rdma: Vec::new(), tcp_only: Vec::new() };
    match registered(&told.name) {
        Ok((_, rows)) => {
            told.rpcbind = true;
            (told.rdma, told.tcp_only) = programs(&rows);
        }
        // Who only calls others needs none here.
        Err(error) if host.is_some() => problems.push(error.text().to_owned()),
        Err(_) => {}
    }
    told
}

/// The programs on netid rdma, and those that are on tcp and not there.
fn programs(rows: &[Row]) -> (Vec<String>, Vec<String>) {
    let names = Programs::read();
    let on = |netids: [&str; 2]| -> Vec<u32> {
        let mut found: Vec<u32> =
            rows.iter().filter(|row| netids.contains(&row.netid.as_str())).map(|row| row.prog).collect();
        found.sort_unstable();
        found.dedup();
        found
    };
    let rdma = on(["rdma", "rdma6"]);
    let tcp =
        on(["tcp", "tcp6"]).into_iter().filter(|program| !rdma.contains(program) && *program != 100_000);
    (
        rdma.iter().map(|program| names.program(*program)).collect(),
        tcp.map(|program| names.program(program)).collect(),
    )
}

fn print(report: &Report) {
    println!("rpcrdma {}, {}", report.version, report.system);
    let library = &report.library;
    let none = || "not found".to_owned();
    println!("\nLibrary");
    println!(
        "  file             {}",
        library.file.as_ref().map_or_else(none, |file| file.display().to_string())
    );
    println!("  version          {}", library.version.clone().unwrap_or_else(none));
    println!(
        "  linked programs  {}",
        if library.known_to_loader { "find it" } else { "do not find it: ldconfig, or LD_LIBRARY_PATH" }
    );
    if let Some(preload) = &library.preload {
        println!("  LD_PRELOAD       {preload}");
    }
    println!("\nDevices, the best one first");
    for device in &report.devices {
        println!(
            "  {:7} {:16} {}",
            device.name,
            device.title,
            device.unusable.as_deref().unwrap_or("can be used")
        );
    }
    for adapter in &report.adapters {
        let addresses: Vec<String> = adapter.addresses.iter().map(ToString::to_string).collect();
        println!(
            "  {} port {}: {}, {}, {} {}",
            adapter.device,
            adapter.port,
            adapter.link,
            adapter.state,
            adapter.interface.as_deref().unwrap_or("no interface"),
            addresses.join(" ")
        );
    }
    println!("\nLimits");
    let bytes = |bytes: Option<u64>| bytes.map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
    let LockedMemory { limit, used_at_most } = report.locked_memory;
    let most = used_at_most
        .map_or("; this process may lock more".to_owned(), |most| format!(", of which adapters get {most}"));
    println!("  locked memory    {}{most}", bytes(limit));
    println!(
        "  descriptors      {}",
        report.descriptors.map_or("unlimited".to_owned(), |most| most.to_string())
    );
    let host = &report.host;
    println!("\nHost {}", host.name);
    if let (Some(from), Some(interface)) = (host.from, &host.interface) {
        let device = report.adapters.iter().find(|adapter| adapter.interface.as_ref() == Some(interface));
        let by = device.map_or(String::new(), |adapter| format!(", where {} is", adapter.device));
        println!("  reached          from {from} on {interface}{by}");
    }
    println!(
        "  rpcbind          {}",
        if host.rpcbind { "answers" } else { "does not answer; servers register with it" }
    );
    let list = |names: &[String]| if names.is_empty() { "none".to_owned() } else { names.join(" ") };
    if host.rpcbind {
        println!("  on netid rdma    {}", list(&host.rdma));
        println!("  on tcp only      {}", list(&host.tcp_only));
    }
    println!("\nSettings");
    for setting in &report.settings {
        let value = if setting.value.is_empty() { "none" } else { &setting.value };
        println!("  {:20} {value:16} {}", setting.key, setting.from);
    }
    for bindings in &report.bindings {
        println!(
            "  bindings of {}: {}",
            bindings.file.display(),
            if bindings.wrong.is_empty() { "understood" } else { "wrong" }
        );
    }
    println!("\n{}", if report.problems.is_empty() { "Nothing is in the way." } else { "In the way:" });
    for problem in &report.problems {
        println!("  - {problem}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_from_sysfs() {
        let root = env::temp_dir().join(format!("rpcrdma-info-{}", std::process::id()));
        let port = root.join("rxe0/ports/1");
        fs::create_dir_all(port.join("gid_attrs/ndevs")).expect("a folder");
        for (file, text) in
            [("state", "4: ACTIVE\n"), ("link_layer", "Ethernet\n"), ("gid_attrs/ndevs/0", "lo\n")]
        {
            fs::write(port.join(file), text).expect("a file");
        }
        let found = adapters(&root);
        fs::remove_dir_all(&root).expect("ours");
        assert_eq!(found.len(), 1);
        let Adapter { device, port, link, state, interface, addresses } = &found[0];
        assert_eq!(
            (device.as_str(), port.as_str(), link.as_str(), state.as_str()),
            ("rxe0", "1", "Ethernet", "ACTIVE")
        );
        assert_eq!(interface.as_deref(), Some("lo"));
        assert!(addresses.iter().all(|at| at.is_loopback()), "{addresses:?}");
        assert!(adapters(Path::new("/does/not/exist")).is_empty());
    }

    #[test]
    fn programs_are_those_of_rdma_and_those_that_are_on_tcp_only() {
        let row = |prog, netid: &str| Row {
            prog,
            vers: 1,
            netid: netid.into(),
            uaddr: "0.0.0.0.8.1".into(),
            owner: "superuser".into(),
        };
        let rows = [
            row(100_000, "tcp"),
            row(7, "tcp"),
            row(7, "rdma"),
            row(8, "tcp6"),
            row(9, "udp"),
            row(7, "rdma6"),
        ];
        let (rdma, tcp) = programs(&rows);
        assert_eq!((rdma, tcp), (vec!["7".to_owned()], vec!["8".to_owned()]));
    }
}
