//! `headwater libvirt`: prints XML for domains of libvirt whose disks `headwater export` serves. It neither asks
//! libvirt nor looks for the socket, because domains are defined before their disks are served.
//!
//! | address | disk of the domain | if the export ends and is started again |
//! |---|---|---|
//! | `vhost-user:PATH` | `vhostuser`, with shared memory | the guest waits until the domain is reset |
//! | `nbd+unix:///NAME?socket=PATH` | `network`, write-through | libvirt pauses the domain, and `virsh resume` continues it |
//!
//! An NBD client cannot see that an export has started again with an empty write cache: the guest would continue on
//! another disk than it knows. So NBD is for exports with `--persistent`, and each write is durable before it is
//! answered. The element `reconnect` of NBD disks is left out, because libvirt 9.0 refuses it when it validates a domain,
//! and otherwise ignores it.

use std::path::Path;

use headwater_api::{Problem, ProblemKind};
use headwater_nbd::NbdUri;
use headwater_nbd::client::ServerAddress;
use serde_json::json;

use crate::cli::{LibvirtCommand, LibvirtDiskArgs, LibvirtDomainArgs};
use crate::show;

/// What a domain needs besides a vhost-user disk.
const SHARED_MEMORY: &str = "\
<memoryBacking>
  <source type='memfd'/>
  <access mode='shared'/>
</memoryBacking>
";

/// Prints the XML.
pub fn run(command: &LibvirtCommand, json: bool) -> anyhow::Result<u8> {
    let xml = match command {
        LibvirtCommand::Disk(args) => disk_alone(args)?,
        LibvirtCommand::Domain(args) => domain(args)?,
    };
    show::if_read(match json {
        true => show::json(&json!({ "xml": xml })),
        false => show::bytes(xml.as_bytes()),
    })?;
    Ok(0)
}

/// The address of a disk that is served.
#[derive(Debug, PartialEq, Eq)]
enum Served {
    VhostUser { socket: String },
    Nbd { socket: String, export: String },
}

impl Served {
    /// Parses an address, as `headwater export` prints it.
    fn parse(address: &str) -> Result<Self, Problem> {
        let shown = address.escape_debug();
        let refused = |why: String, advice: &str| {
            let problem =
                Problem::new(ProblemKind::Invalid, format!("cannot print XML for '{shown}': {why}"));
            problem.advise(advice)
        };
        let forms = "give what 'headwater export' prints: vhost-user:PATH or nbd+unix:///NAME?socket=PATH";
        let socket = |path: &Path| match path.to_str() {
            Some(text) if path.is_absolute() && !text.chars().any(char::is_control) => Ok(text.to_owned()),
            Some(text) if !path.is_absolute() => {
                let why = format!("libvirt needs the absolute path of the socket, and '{text}' is relative");
                Err(refused(why, "start the export with an absolute path"))
            }
            _ => Err(refused("the path of the socket is not printable text".into(), "choose another path")),
        };
        if let Some(path) = address.strip_prefix("vhost-user:") {
            return Ok(Self::VhostUser { socket: socket(Path::new(path))? });
        }
        if !NbdUri::is_uri(address) {
            return Err(refused("it is not the address of a disk for a domain".into(), forms));
        }
        let uri: NbdUri = address.parse().map_err(|why| refused(format!("{why}"), forms))?;
        let path = match uri.server {
            ServerAddress::Unix(path) if uri.tls.is_none() => path,
            _ => {
                let why = "a domain gets its disk from a unix socket of its host, without TLS";
                let advice = "run 'headwater export' on the domain's host: it can read images of other hosts";
                return Err(refused(why.into(), advice));
            }
        };
        if uri.export.chars().any(char::is_control) {
            return Err(refused(
                "its export name is not printable text".into(),
                "choose another --nbd-export",
            ));
        }
        Ok(Self::Nbd { socket: socket(&path)?, export: uri.export })
    }

    /// The disk element.
    fn disk(&self, target: &str) -> String {
        match self {
            Self::VhostUser { socket } => format!(
                "\
<disk type='vhostuser' device='disk'>
  <driver name='qemu' type='raw'/>
  <source type='unix' path='{}'>
    <reconnect enabled='yes' timeout='1'/>
  </source>
  <target dev='{target}' bus='virtio'/>
</disk>
",
                escaped(socket)
            ),
            Self::Nbd { socket, export } => {
                let name = match export.as_str() {
                    "" => String::new(),
                    name => format!(" name='{}'", escaped(name)),
                };
                format!(
                    "\
<disk type='network' device='disk'>
  <driver name='qemu' type='raw' cache='writethrough' error_policy='stop' rerror_policy='stop' discard='unmap'/>
  <source protocol='nbd'{name}>
    <host transport='unix' socket='{}'/>
  </source>
  <target dev='{target}' bus='virtio'/>
</disk>
",
                    escaped(socket)
                )
            }
        }
    }

    /// What the person who uses the XML has to know. Comments in XML have no two hyphens in a row.
    fn remark(&self) -> &'static str {
        match self {
            Self::VhostUser { .. } => {
                "The domain needs shared memory: <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>"
            }
            Self::Nbd { .. } => {
                "Only for an export with the option 'persistent': otherwise a crash of the export corrupts the guest"
            }
        }
    }
}

fn disk_alone(args: &LibvirtDiskArgs) -> anyhow::Result<String> {
    let served = Served::parse(&args.address)?;
    Ok(format!("<!-- {} -->\n{}", served.remark(), served.disk(&args.target)))
}

fn domain(args: &LibvirtDomainArgs) -> anyhow::Result<String> {
    headwater_api::name::check_label("domain", &args.name)?;
    let served = Served::parse(&args.address)?;
    let memory = match served {
        Served::VhostUser { .. } => indented(SHARED_MEMORY, 2),
        Served::Nbd { .. } => format!("  <!-- {} -->\n", served.remark()),
    };
    let network = args.network.as_ref().map_or_else(String::new, |network| {
        let card = format!(
            "<interface type='network'>\n  <source network='{}'/>\n  <model type='virtio'/>\n</interface>\n",
            escaped(network)
        );
        indented(&card, 4)
    });
    Ok(format!(
        "\
<domain type='{hypervisor}'>
  <name>{name}</name>
  <memory unit='bytes'>{bytes}</memory>
  <vcpu>{cpus}</vcpu>
{memory}  <os>
    <type machine='q35'>hvm</type>
  </os>
  <features>
    <acpi/>
  </features>
  <cpu mode='maximum'/>
  <devices>
{disk}{network}    <console type='pty'/>
    <channel type='unix'>
      <target type='virtio' name='org.qemu.guest_agent.0'/>
    </channel>
    <rng model='virtio'>
      <backend model='random'>/dev/urandom</backend>
    </rng>
  </devices>
</domain>
",
        hypervisor = if args.emulated { "qemu" } else { "kvm" },
        name = args.name,
        bytes = args.memory,
        cpus = args.cpus,
        disk = indented(&served.disk("vda"), 4),
    ))
}

/// Puts spaces before each line.
fn indented(text: &str, spaces: usize) -> String {
    text.lines().map(|line| format!("{:spaces$}{line}\n", "")).collect()
}

/// Escapes text for an attribute in single quotes.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&apos;"),
            '"' => out.push_str("&quot;"),
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(address: &str, target: &str) -> String {
        disk_alone(&LibvirtDiskArgs { address: address.into(), target: target.into() }).unwrap()
    }

    fn refusal(address: &str) -> String {
        crate::failure::one_line(&Served::parse(address).unwrap_err().into())
    }

    #[test]
    fn a_vhost_user_disk_reconnects_and_names_shared_memory() {
        let expected = "\
<!-- The domain needs shared memory: <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking> -->
<disk type='vhostuser' device='disk'>
  <driver name='qemu' type='raw'/>
  <source type='unix' path='/run/lab/1.sock'>
    <reconnect enabled='yes' timeout='1'/>
  </source>
  <target dev='vda' bus='virtio'/>
</disk>
";
        assert_eq!(disk("vhost-user:/run/lab/1.sock", "vda"), expected);
    }

    #[test]
    fn an_nbd_disk_is_write_through_and_stops_at_errors() {
        let expected = "\
<!-- Only for an export with the option 'persistent': otherwise a crash of the export corrupts the guest -->
<disk type='network' device='disk'>
  <driver name='qemu' type='raw' cache='writethrough' error_policy='stop' rerror_policy='stop' discard='unmap'/>
  <source protocol='nbd' name='desk-1'>
    <host transport='unix' socket='/run/lab/nbd.sock'/>
  </source>
  <target dev='vdb' bus='virtio'/>
</disk>
";
        assert_eq!(disk("nbd+unix:///desk-1?socket=/run/lab/nbd.sock", "vdb"), expected);
        let without_name = disk("nbd+unix:///?socket=/run/lab/nbd.sock", "vda");
        assert!(without_name.contains("<source protocol='nbd'>"), "{without_name}");
    }

    #[test]
    fn special_characters_do_not_break_the_xml() {
        let xml = disk("vhost-user:/run/a&b'<c>\".sock", "vda");
        assert!(xml.contains("path='/run/a&amp;b&apos;&lt;c&gt;&quot;.sock'"), "{xml}");
        let xml = disk("nbd+unix:///a%26%27?socket=/run/a%20%3Cb.sock", "vda");
        assert!(xml.contains("name='a&amp;&apos;'") && xml.contains("socket='/run/a &lt;b.sock'"), "{xml}");
    }

    #[test]
    fn other_addresses_are_refused_with_advice() {
        for (address, words) in [
            ("/run/lab/1.sock", ["not the address of a disk", "vhost-user:PATH"]),
            ("iscsi://host/iqn.x/0", ["not the address of a disk", "nbd+unix:"]),
            ("vhost-user:run/1.sock", ["'run/1.sock' is relative", "absolute path"]),
            ("vhost-user:", ["absolute", "start the export"]),
            ("vhost-user:/run/a\nb", ["not printable", "another path"]),
            ("nbd+unix:///a%0ab?socket=/run/s", ["export name", "--nbd-export"]),
            ("nbd+unix:///x", ["?socket=PATH is missing", "headwater export"]),
            ("nbd://host/x", ["unix socket of its host", "run 'headwater export' on the domain's host"]),
            ("nbds+unix:///x?socket=/run/s", ["without TLS", "other hosts"]),
        ] {
            let said = refusal(address);
            assert!(words.iter().all(|word| said.contains(word)), "{address}: {said}");
        }
    }

    #[test]
    fn a_domain_has_shared_memory_for_vhost_user_only() {
        let args = |address: &str| LibvirtDomainArgs {
            name: "desk-1".into(),
            address: address.into(),
            memory: 1 << 30,
            cpus: 3,
            network: Some("default".into()),
            emulated: true,
        };
        let xml = domain(&args("vhost-user:/run/lab/1.sock")).unwrap();
        for part in [
            "<domain type='qemu'>\n  <name>desk-1</name>\n",
            "<memory unit='bytes'>1073741824</memory>\n  <vcpu>3</vcpu>\n  <memoryBacking>\n    <source type='memfd'/>\n",
            "    <disk type='vhostuser' device='disk'>\n",
            "      <source network='default'/>\n",
        ] {
            assert!(xml.contains(part), "{part}: {xml}");
        }
        let xml = domain(&args("nbd+unix:///?socket=/run/lab/nbd.sock")).unwrap();
        assert!(!xml.contains("memfd") && xml.contains("<!-- Only for an export with"), "{xml}");
        let plain = LibvirtDomainArgs { network: None, emulated: false, ..args("vhost-user:/run/1.sock") };
        let xml = domain(&plain).unwrap();
        assert!(xml.starts_with("<domain type='kvm'>") && !xml.contains("<interface"), "{xml}");
        let odd = LibvirtDomainArgs { name: "a/b".into(), ..plain };
        let said = crate::failure::one_line(&domain(&odd).unwrap_err());
        assert!(said.contains("'a/b' is not a domain name"), "{said}");
    }
}
