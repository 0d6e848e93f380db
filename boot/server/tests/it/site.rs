//! Tests DHCP servers of sites with the generated configuration: each kind of client gets its loader.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use headwater_boot_server::loaders::{BIOS_NAME, EFI_NAME};
use headwater_boot_server::site::{Product, Server, configuration};
use headwater_dhcp::{Mac, MessageType, Packet, option};

use crate::namespace::{Background, Client, FAR, Far, enter};

const BOOT_FILE: u8 = 67;

fn generated(product: Product) -> String {
    let server = Server {
        address: [10, 77, 0, 2].into(),
        http_port: 8069,
        bios_loader: BIOS_NAME.into(),
        efi_loader: EFI_NAME.into(),
    };
    configuration(product, &server)
}

fn firmware(number: u8, class: &str, arch: u16) -> Packet {
    let packet =
        Packet::of_client(u32::from(number) + 77, Mac([2, 0, 0, 0, 0, number]), MessageType::Discover);
    let packet = Packet { broadcast: true, ..packet };
    packet.with(option::VENDOR_CLASS, class).with(option::ARCHITECTURE, arch.to_be_bytes())
}

/// Sends a request as each kind of client, and checks the answer.
fn check(client: &Client) {
    let told = |asked: &Packet| {
        let answer = client.ask(asked);
        assert!(!answer.yiaddr.is_unspecified(), "no address: {answer:?}");
        let named = answer.option(BOOT_FILE).unwrap_or(&answer.file);
        let named = String::from_utf8_lossy(named).trim_end_matches('\0').to_owned();
        (named, answer.siaddr.octets(), answer)
    };
    let server = [10, 77, 0, 2];
    for (number, arch, name) in [(1, 0, BIOS_NAME), (2, 7, EFI_NAME), (3, 9, EFI_NAME)] {
        let (named, at, _) = told(&firmware(number, &format!("PXEClient:Arch:{arch:05}:UNDI:003000"), arch));
        assert_eq!((named.as_str(), at), (name, server), "architecture {arch}");
    }
    let (named, _, answer) = told(&firmware(4, "HTTPClient:Arch:00016:UNDI:003001", 16));
    assert_eq!(named, format!("http://10.77.0.2:8069/l/{EFI_NAME}"));
    assert_eq!(answer.option(option::VENDOR_CLASS), Some(&b"HTTPClient"[..]));
    for (number, arch) in [(5, 0), (6, 7)] {
        let ipxe = firmware(number, &format!("PXEClient:Arch:{arch:05}:UNDI:003001"), arch)
            .with(option::USER_CLASS, *b"iPXE")
            .with(option::IPXE, [0x13, 1, 1]);
        assert_eq!(told(&ipxe).0, "http://10.77.0.2:8069/b/${netX/mac:hexhyp}/boot.ipxe");
    }
    let other = Packet::of_client(99, Mac([2, 0, 0, 0, 0, 7]), MessageType::Discover);
    let (named, _, answer) = told(&Packet { broadcast: true, ..other });
    assert_eq!((named.as_str(), answer.option(option::VENDOR_CLASS)), ("", None));
}

fn start(command: &mut Command) -> Background {
    Background(command.stdout(Stdio::null()).spawn().unwrap())
}

#[test]
fn dnsmasq_names_the_loader_for_each_client() {
    if !enter("site::dnsmasq_names_the_loader_for_each_client") {
        return;
    }
    let (far, dir) = (Far::connect(), tempfile::tempdir().unwrap());
    far.set_address("10.77.0.1/24");
    let file = dir.path().join("headwater.conf");
    std::fs::write(&file, generated(Product::Dnsmasq)).unwrap();
    let mut command = far.command("dnsmasq");
    command
        .args(["--keep-in-foreground", "--port=0", "--user=root", "--no-ping", "--pid-file="])
        .args(["--dhcp-range=10.77.0.50,10.77.0.99", "--bind-interfaces"])
        .arg(format!("--interface={FAR}"))
        .arg(format!("--dhcp-leasefile={}", dir.path().join("leases").display()))
        .arg(format!("--conf-file={}", file.display()));
    let _dnsmasq = start(&mut command);
    check(&Client::new());
}

/// The directory into which `boot/test` unpacked the DHCP servers of Debian.
fn programs() -> PathBuf {
    std::env::var_os("HEADWATER_SITE_PROGRAMS").expect("boot/test sets HEADWATER_SITE_PROGRAMS").into()
}

#[test]
#[ignore = "needs isc-dhcp-server, which boot/test unpacks"]
fn isc_dhcp_names_the_loader_for_each_client() {
    if !enter("site::isc_dhcp_names_the_loader_for_each_client") {
        return;
    }
    let (far, dir) = (Far::connect(), tempfile::tempdir().unwrap());
    far.set_address("10.77.0.1/24");
    let (file, leases) = (dir.path().join("dhcpd.conf"), dir.path().join("leases"));
    let subnet =
        "ping-check false;\nsubnet 10.77.0.0 netmask 255.255.255.0 { range 10.77.0.50 10.77.0.99; }\n";
    std::fs::write(&file, generated(Product::Isc) + subnet).unwrap();
    std::fs::write(&leases, "").unwrap();
    let dhcpd = programs().join("usr/sbin/dhcpd");
    let mut command = far.command(dhcpd.to_str().unwrap());
    command.args(["-4", "-f", "-q", "--no-pid", "-user", "root", "-group", "root"]);
    command.arg("-cf").arg(&file).arg("-lf").arg(&leases).arg(FAR);
    let _dhcpd = start(&mut command);
    check(&Client::new());
}

#[test]
#[ignore = "needs kea-dhcp4-server, which boot/test unpacks"]
fn kea_names_the_loader_for_each_client() {
    if !enter("site::kea_names_the_loader_for_each_client") {
        return;
    }
    let (far, dir) = (Far::connect(), tempfile::tempdir().unwrap());
    far.set_address("10.77.0.1/24");
    let file = dir.path().join("kea.conf");
    let subnet = "\"subnet\": \"10.77.0.0/24\", \"pools\": [ { \"pool\": \"10.77.0.50 - 10.77.0.99\" } ]";
    // A new virtual cable takes a second to come up.
    let interfaces = format!(
        "\"interfaces\": [ \"{FAR}\" ], \"service-sockets-max-retries\": 40, \"service-sockets-retry-wait-time\": 250"
    );
    let text = format!(
        "{{ \"Dhcp4\": {{\n{}\"interfaces-config\": {{ {interfaces} }},\n\"subnet4\": [ {{ {subnet} }} ],\n\
         \"lease-database\": {{ \"type\": \"memfile\", \"persist\": false }}, \"valid-lifetime\": 600 }} }}\n",
        generated(Product::Kea)
    );
    std::fs::write(&file, text).unwrap();
    let programs = programs();
    let mut command = far.command(programs.join("usr/sbin/kea-dhcp4").to_str().unwrap());
    command.env("LD_LIBRARY_PATH", programs.join("usr/lib/x86_64-linux-gnu"));
    command.env("KEA_LOCKFILE_DIR", "none").env("KEA_PIDFILE_DIR", dir.path());
    let _kea = start(command.arg("-c").arg(&file));
    check(&Client::new());
}
