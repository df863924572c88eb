//! RDMA devices as the kernel describes them in sysfs. Only the library can say whether it can use one.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use rpcrdma::tool::host;
use serde::Serialize;

/// A device.
#[derive(Serialize)]
pub struct Device {
    pub name: String,
    /// "InfiniBand channel adapter", "iWARP RNIC".
    pub kind: String,
    pub ports: Vec<Port>,
}

/// A port of a device.
#[derive(Serialize)]
pub struct Port {
    pub number: u32,
    /// "ACTIVE", "DOWN".
    pub state: String,
    /// "Ethernet", "InfiniBand".
    pub link_layer: String,
    pub interfaces: Vec<String>,
    pub addresses: Vec<IpAddr>,
}

/// The devices of this machine.
pub fn all() -> Vec<Device> {
    under(Path::new("/sys/class/infiniband"))
}

fn under(root: &Path) -> Vec<Device> {
    let device = |name: String| {
        let folder = root.join(&name);
        let mut ports: Vec<Port> = entries(&folder.join("ports"))
            .into_iter()
            .filter_map(|number| Some(port(&folder.join("ports").join(&number), number.parse().ok()?)))
            .collect();
        ports.sort_by_key(|port| port.number);
        Device { kind: behind_colon(&word(&folder.join("node_type"))), name, ports }
    };
    entries(root).into_iter().map(device).collect()
}

fn port(folder: &Path, number: u32) -> Port {
    let names = folder.join("gid_attrs/ndevs");
    let interfaces: BTreeSet<String> =
        entries(&names).iter().map(|at| word(&names.join(at))).filter(|name| !name.is_empty()).collect();
    let addresses = interfaces.iter().flat_map(|name| host::addresses(name)).collect();
    Port {
        number,
        state: behind_colon(&word(&folder.join("state"))),
        link_layer: word(&folder.join("link_layer")),
        interfaces: interfaces.into_iter().collect(),
        addresses,
    }
}

/// "4: ACTIVE" is "ACTIVE".
fn behind_colon(text: &str) -> String {
    text.split_once(": ").map_or(text, |(_, name)| name).to_owned()
}

fn word(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_default().trim().to_owned()
}

fn entries(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_read_as_the_kernel_writes_it() {
        let root = std::env::temp_dir().join(format!("rpcrdma-devices-{}", std::process::id()));
        let port = root.join("rxe0/ports/1");
        fs::create_dir_all(port.join("gid_attrs/ndevs")).unwrap();
        for (file, text) in [
            ("rxe0/node_type", "1: CA\n"),
            ("rxe0/ports/1/state", "4: ACTIVE\n"),
            ("rxe0/ports/1/link_layer", "Ethernet\n"),
            ("rxe0/ports/1/gid_attrs/ndevs/0", "lo\n"),
            ("rxe0/ports/1/gid_attrs/ndevs/1", "lo\n"),
        ] {
            fs::write(root.join(file), text).unwrap();
        }
        let devices = under(&root);
        fs::remove_dir_all(&root).unwrap();
        let [device] = &devices[..] else { panic!("{} devices", devices.len()) };
        assert_eq!((device.name.as_str(), device.kind.as_str()), ("rxe0", "CA"));
        let port = &device.ports[0];
        assert_eq!((port.number, port.state.as_str(), port.link_layer.as_str()), (1, "ACTIVE", "Ethernet"));
        assert_eq!(port.interfaces, ["lo"]);
        assert!(under(Path::new("/does/not/exist")).is_empty());
    }
}
