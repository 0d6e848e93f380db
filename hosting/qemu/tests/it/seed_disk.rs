//! Tests the seed disk by reading it with other programs (mtools, fsck, cloud-init's formats).

use std::net::Ipv4Addr;
use std::path::Path;

use headwater_qemu::{CardAddress, Identity, MacAddress, Network, SshHostKey, seed};
use headwater_testkit::run;
use uuid::Uuid;

const UUID: Uuid = Uuid::from_u128(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
const MAC: MacAddress = MacAddress([0x52, 0x54, 0, 1, 2, 3]);

fn file(disk: &Path, name: &str) -> String {
    run("mtools", "mtype", &["-i", disk.to_str().unwrap(), &format!("::{name}")])
}

#[test]
fn the_disk_is_sound_and_holds_the_identity() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("seed.img");
    let mut identity = Identity::new("lab-1", UUID);
    identity.user_data = Some(b"#!/bin/sh\necho \"done\" >/tmp/it\n".to_vec());
    let (private, public) = ("-----BEGIN x\nfoo\n-----END x\n".to_owned(), "ssh-ed25519 bar\n".to_owned());
    identity.ssh_host_keys.push(SshHostKey { kind: "ed25519".into(), private, public });
    for (name, value) in [("room", "7"), ("url", "https://example.com/?a=\"b\"")] {
        identity.personality.insert(name.to_owned(), value.to_owned());
    }
    seed::write(&disk, &identity, &Network::User, MAC).unwrap();

    let path = disk.to_str().unwrap();
    run("dosfstools", "fsck.vfat", &["-n", path]);
    let found = run("util-linux", "blkid", &["-p", "-o", "export", path]);
    assert!(found.contains("LABEL=CIDATA\n") && found.contains("TYPE=vfat\n"), "{found}");

    assert_eq!(file(&disk, "user-data"), "#!/bin/sh\necho \"done\" >/tmp/it\n");
    assert_eq!(file(&disk, "hostname"), "lab-1\n");
    assert_eq!(file(&disk, "machine-id"), "0123456789abcdef0123456789abcdef\n");
    let meta: serde_json::Value = serde_json::from_str(&file(&disk, "meta-data")).unwrap();
    assert_eq!(meta["local-hostname"], "lab-1");
    assert_eq!(meta["instance-id"], UUID.to_string());
    assert_eq!(meta["personality"]["url"], "https://example.com/?a=\"b\"");
    assert_eq!(file(&disk, "personality"), "room=7\nurl=https://example.com/?a=\"b\"\n");
    let network: serde_json::Value = serde_json::from_str(&file(&disk, "network-config")).unwrap();
    assert_eq!(network["ethernets"]["net0"]["match"]["macaddress"], "52:54:00:01:02:03");
    let vendor = file(&disk, "vendor-data");
    let vendor: serde_json::Value =
        serde_json::from_str(vendor.strip_prefix("#cloud-config\n").unwrap()).unwrap();
    let key = file(&disk, "ssh_host_ed25519_key");
    assert_eq!(vendor["ssh_keys"]["ed25519_private"], *key);
    assert_eq!(vendor["ssh_keys"]["ed25519_public"], *file(&disk, "ssh_host_ed25519_key.pub"));
}

#[test]
fn a_fixed_address_is_only_for_a_card_on_a_bridge() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("seed.img");
    let mut identity = Identity::new("lab-1", UUID);
    let dns = vec![Ipv4Addr::new(10, 1, 2, 2), Ipv4Addr::new(9, 9, 9, 9)];
    let ip = Ipv4Addr::new(10, 1, 2, 31);
    identity.address = Some(CardAddress { ip, prefix: 24, gateway: Some(Ipv4Addr::new(10, 1, 2, 1)), dns });
    let card = |disk: &Path| {
        let config: serde_json::Value = serde_json::from_str(&file(disk, "network-config")).unwrap();
        assert_eq!(config["version"], 2);
        config["ethernets"]["net0"].clone()
    };
    let bridge = Network::Bridge("br0".to_owned());
    seed::write(&disk, &identity, &bridge, MAC).unwrap();
    let expected = serde_json::json!({
        "match": { "macaddress": "52:54:00:01:02:03" },
        "dhcp4": false,
        "addresses": ["10.1.2.31/24"],
        "routes": [{ "to": "0.0.0.0/0", "via": "10.1.2.1" }],
        "nameservers": { "addresses": ["10.1.2.2", "9.9.9.9"] },
    });
    assert_eq!(card(&disk), expected);
    assert_eq!(
        file(&disk, "card.network"),
        "[Match]\nMACAddress=52:54:00:01:02:03\n\n[Network]\nAddress=10.1.2.31/24\nGateway=10.1.2.1\nDNS=10.1.2.2\nDNS=9.9.9.9\n"
    );
    let by_dhcp = serde_json::json!({ "match": { "macaddress": "52:54:00:01:02:03" }, "dhcp4": true });
    seed::write(&disk, &identity, &Network::User, MAC).unwrap();
    assert_eq!(card(&disk), by_dhcp);
    identity.address = None;
    seed::write(&disk, &identity, &bridge, MAC).unwrap();
    assert_eq!(card(&disk), by_dhcp);
}

#[test]
fn user_data_that_gzip_packed_reaches_the_seed_disk_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let (plain, disk) = (dir.path().join("user-data"), dir.path().join("seed.img"));
    let text = "#cloud-config\npackages: [nginx]\n";
    std::fs::write(&plain, text).unwrap();
    run("gzip", "gzip", &[plain.to_str().unwrap()]);
    let packed = std::fs::read(dir.path().join("user-data.gz")).unwrap();
    let mut identity = Identity::new("lab-1", UUID);
    identity.user_data = Some(packed.clone());
    seed::write(&disk, &identity, &Network::None, MAC).unwrap();

    let (from, copy) = (disk.to_str().unwrap(), dir.path().join("copy.gz"));
    run("mtools", "mcopy", &["-i", from, "::user-data", copy.to_str().unwrap()]);
    assert!(std::fs::read(&copy).unwrap() == packed);
    assert_eq!(run("gzip", "gunzip", &["-c", copy.to_str().unwrap()]), text);
}

#[test]
fn the_machine_id_command_sets_the_machine_id() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("seed.img");
    seed::write(&disk, &Identity::new("lab-1", UUID), &Network::None, MAC).unwrap();
    assert_eq!(file(&disk, "user-data"), "#cloud-config\n{}\n");
    let vendor = file(&disk, "vendor-data");
    let vendor: serde_json::Value =
        serde_json::from_str(vendor.strip_prefix("#cloud-config\n").unwrap()).unwrap();
    let target = dir.path().join("machine-id");
    let command =
        vendor["bootcmd"][0][2].as_str().unwrap().replace("/etc/machine-id", target.to_str().unwrap());
    for before in [None, Some("other\n")] {
        let _ = std::fs::remove_file(&target);
        if let Some(before) = before {
            std::fs::write(&target, before).unwrap();
        }
        run("dash", "sh", &["-c", &command]);
        assert_eq!(std::fs::read_to_string(&target).unwrap(), format!("{}\n", UUID.simple()));
    }
}

#[test]
fn equal_identities_give_equal_disks_that_only_the_owner_reads() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    let identity = Identity::new("lab-1", UUID);
    seed::write(&a, &identity, &Network::None, MAC).unwrap();
    std::fs::write(&b, "something that was there").unwrap();
    seed::write(&b, &identity, &Network::None, MAC).unwrap();
    assert!(std::fs::read(&a).unwrap() == std::fs::read(&b).unwrap());
    let mode = std::os::unix::fs::PermissionsExt::mode(&b.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let missing = dir.path().join("missing/seed.img");
    let error = seed::write(&missing, &identity, &Network::None, MAC).unwrap_err().to_string();
    assert!(error.contains("missing/seed.img"), "{error}");
}
