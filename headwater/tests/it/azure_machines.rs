//! A catalog of machines in Azure, from its creation to its removal, against a fake Azure.

use std::process::Stdio;

use headwater_testkit::wait_until;
use headwater_testkit_azure::arm::{ArmFault, Size};
use serde_json::json;

use crate::azure::{Azure, GROUP, import, json_of, set_secret};
use crate::support::{Daemon, Ran, headwater};

const SUBNET: &str =
    "/subscriptions/s/resourceGroups/n/providers/Microsoft.Network/virtualNetworks/v/subnets/desks";
const D8: &str = "Standard_D8ds_v5";
const SSH_KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE anna@example\n";

/// The region offers this size, whose temp disk holds an OS disk.
fn offer(azure: &Azure, name: &str) {
    offer_with(azure, name, "307200");
}

/// The region offers this size, whose temp disk has so many MiB.
fn offer_with(azure: &Azure, name: &str, temp_mib: &str) {
    let mut size = Size::new(name, "standardDDSv5Family", 8, "ResourceDisk");
    let capabilities =
        [("MemoryGB", "32"), ("MaxResourceVolumeMB", temp_mib), ("HyperVGenerations", "V1,V2")];
    size.capabilities.extend(capabilities.map(|(name, value)| (name.to_owned(), value.to_owned())));
    azure.server.management().sizes.push(size);
}

fn create(daemon: &Daemon, catalog: &str, image: &str, size: &str, more: &[&str]) -> Ran {
    let key = daemon.path().join("key.pub");
    std::fs::write(&key, SSH_KEY).unwrap();
    let place =
        ["--connection", "prod", "--size", size, "--subnet", SUBNET, "--ssh-key", key.to_str().unwrap()];
    daemon.cli(&[&["catalog", "create", catalog, image][..], &place, more].concat())
}

fn state(daemon: &Daemon, machine: &str) -> String {
    json_of(daemon, &["machine", "show", machine])["state"].as_str().unwrap().to_owned()
}

/// Begins a start, and returns when Azure creates the machine and does not answer.
fn begin_start(azure: &Azure, daemon: &Daemon, machine: &str) {
    azure.hang_at("PUT", "/virtualMachines/", ArmFault::KillAfter);
    // It ends with its daemon, or with a forced stop.
    begin(daemon, &["machine", "start", machine]);
    azure.wait_for_kill();
}

/// Begins a command, and leaves it alone.
fn begin(daemon: &Daemon, args: &[&str]) {
    let mut command = headwater();
    command.arg("--data-dir").arg(daemon.path()).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    std::thread::spawn(move || command.status());
}

impl Azure {
    /// The paths of all resources of a kind.
    fn all(&self, kind: &str) -> Vec<String> {
        self.resources().into_iter().filter(|path| path.contains(kind)).collect()
    }

    fn vms(&self) -> Vec<String> {
        self.all("/virtualMachines/")
    }

    /// The path of the virtual machine of a machine.
    fn vm_of(&self, daemon: &Daemon, machine: &str) -> String {
        let uuid = json_of(daemon, &["machine", "show", machine])["uuid"].as_str().unwrap().to_owned();
        format!("{GROUP}/providers/Microsoft.Compute/virtualMachines/hw-{uuid}")
    }
}

/// An Azure with a published version of `debian`, and the daemon that has published it.
fn published() -> (Azure, Daemon) {
    let (azure, daemon) = (Azure::start(), Daemon::start());
    offer(&azure, D8);
    azure.connect(&daemon, "prod").ok();
    import(&daemon, "debian", &[("usr/bin/cloud-init", b"#!"), ("usr/lib/os-release", b"ID=debian\n")]);
    (azure, daemon)
}

#[test]
fn a_catalog_lives_in_azure_though_the_daemon_is_killed() {
    let (azure, daemon) = published();
    create(&daemon, "class", "debian@1", D8, &[]).fails(
        4,
        &["debian@1 is not published to connection 'prod'", "image publish debian@1 --connection prod"],
    );
    daemon.cli(&["image", "publish", "debian@1", "--connection", "prod"]).ok();
    let local = ["--ephemeral", "--places", "temp", "--zones", "2", "--count", "3", "--name", "class-##"];
    let created = create(&daemon, "class", "debian@1", D8, &local).ok();
    assert!(created.contains("created catalog class"), "{created}");
    let shown = daemon.cli(&["catalog", "show", "class"]).ok();
    assert!(shown.contains(D8) && shown.contains("prod (Azure)") && shown.contains("class-03"), "{shown}");
    assert_eq!(azure.vms(), Vec::<String>::new());

    // Killed in the middle of a start.
    begin_start(&azure, &daemon, "class-01");
    assert_eq!(state(&daemon, "class-01"), "starting");
    let daemon = Daemon::start_in(daemon.kill(), |_| {});
    wait_until("the next daemon continues the start", || state(&daemon, "class-01") == "running");
    let first = azure.vm_of(&daemon, "class-01");
    assert_eq!(azure.vms(), std::slice::from_ref(&first));
    assert_eq!(azure.server.management().created[&first], 1);

    daemon.cli(&["machine", "start", "--catalog", "class"]).ok();
    assert_eq!((azure.vms().len(), azure.all("/networkInterfaces/").len()), (3, 3));
    let listed = daemon.cli(&["machine", "list", "catalog:class", "state:running"]).ok();
    assert!(listed.contains("class-03") && listed.contains("prod (Azure)"), "{listed}");
    let shown = daemon.cli(&["machine", "show", "class-02"]).ok();
    assert!(shown.contains("Standard_D8ds_v5 in zone 2, OS disk: temp"), "{shown}");
    assert_eq!(azure.server.management().resources[&first]["zones"], json!(["2"]));

    // A reset keeps the machine and gives it a pristine disk; a stop deletes it, and keeps its address.
    let second = azure.vm_of(&daemon, "class-02");
    daemon.cli(&["machine", "reset", "class-02"]).ok();
    assert_eq!(azure.server.management().machines[&second].reimages, 1);
    let stopped = daemon.cli(&["machine", "stop", "class-03"]).ok();
    assert!(stopped.contains("class-03 is stopped"), "{stopped}");
    assert_eq!((azure.vms().len(), azure.all("/networkInterfaces/").len()), (2, 3));

    // Somebody deletes a machine there. The daemon sees that when it starts, and every five minutes.
    azure.server.management().resources.remove(&second);
    azure.server.management().machines.remove(&second);
    let daemon = Daemon::start_in(daemon.kill(), |_| {});
    wait_until("the daemon misses the machine", || state(&daemon, "class-02") == "lost");
    daemon.cli(&["machine", "start", "class-02"]).ok();
    assert_eq!(state(&daemon, "class-02"), "running");

    daemon.cli(&["image", "unpublish", "debian@1", "--connection", "prod"]).fails(4, &["class-01, class-02"]);
    daemon.cli(&["connection", "remove", "prod"]).fails(4, &["class", "catalog scale CATALOG 0"]);
    daemon.cli(&["machine", "remove", "class-01"]).fails(4, &["class-01", "it is running"]);
    daemon.cli(&["catalog", "scale", "class", "1"]).ok();
    assert_eq!(azure.all("/networkInterfaces/").len(), 1);
    daemon.cli(&["machine", "remove", "--catalog", "class", "--force"]).ok();
    daemon.cli(&["catalog", "remove", "class"]).ok();
    assert_eq!((azure.vms().len(), azure.all("/networkInterfaces/").len()), (0, 0));
    daemon.cli(&["image", "unpublish", "debian@1", "--connection", "prod"]).ok();
    daemon.cli(&["connection", "remove", "prod"]).ok();
    assert_eq!(azure.resources(), Vec::<String>::new());
}

#[test]
fn a_scale_removes_machines_together_and_names_those_that_stay() {
    let (azure, daemon) = published();
    daemon.cli(&["image", "publish", "debian@1", "--connection", "prod"]).ok();
    create(&daemon, "class", "debian@1", D8, &["--count", "3"]).ok();
    daemon.cli(&["machine", "start", "--catalog", "class"]).ok();

    let right = ArmFault::Refused(403, "AuthorizationFailed", "the identity has no right to do this");
    azure.hang_at("DELETE", "/virtualMachines/", right);
    azure.hang_at("DELETE", "/virtualMachines/", right);
    let refused = daemon.cli(&["catalog", "scale", "class", "1"]);
    assert!(refused.code != 0 && refused.err.contains("AuthorizationFailed"), "{refused:?}");
    assert!(refused.err.contains("class-02") && refused.err.contains("class-03"), "{refused:?}");
    assert_eq!(azure.vms().len(), 3);

    // Azure does not answer for one machine, and the others are removed meanwhile.
    azure.hang_at("DELETE", "/virtualMachines/", ArmFault::KillBefore);
    begin(&daemon, &["catalog", "scale", "class", "0"]);
    azure.wait_for_kill();
    wait_until("the others are removed", || azure.all("/networkInterfaces/").len() == 1);
    let daemon = Daemon::start_in(daemon.kill(), |_| {});
    wait_until("the task has removed the last", || daemon.cli(&["catalog", "remove", "class"]).code == 0);
    assert_eq!((azure.vms().len(), azure.all("/networkInterfaces/").len()), (0, 0));
}

#[test]
fn a_connection_whose_identity_is_gone_is_forgotten() {
    let (azure, daemon) = published();
    daemon.cli(&["image", "publish", "debian@1", "--connection", "prod"]).ok();
    create(&daemon, "class", "debian@1", D8, &["--count", "2"]).ok();
    daemon.cli(&["machine", "start", "--catalog", "class"]).ok();
    // Azure never answers for one machine, and refuses to do anything for the other.
    azure.hang_at("DELETE", "/virtualMachines/", ArmFault::KillBefore);
    begin(&daemon, &["machine", "stop", "class-02"]);
    azure.wait_for_kill();
    azure.server.management().is_login_refused = true;
    set_secret(&daemon, "prod", "wrong").ok();
    let refused = daemon.cli(&["machine", "stop", "class-01"]);
    assert!(refused.code != 0 && refused.err.contains("its secret is wrong"), "{refused:?}");

    daemon.cli(&["connection", "remove", "prod"]).fails(4, &["class", "connection remove prod --forget"]);
    let there = azure.resources();
    let said = daemon.cli(&["connection", "remove", "prod", "--forget"]).ok();
    assert!(said.contains("resource group lab") && said.contains("headwater-owner"), "{said}");
    for (args, list) in [
        (&["connection", "list"][..], "connections"),
        (&["catalog", "list"], "catalogs"),
        (&["machine", "list"], "machines"),
        (&["image", "published"], "published"),
    ] {
        assert_eq!(json_of(&daemon, args)[list], json!([]));
    }
    assert_eq!(azure.resources(), there);
    let owner = std::fs::read_to_string(daemon.path().join("daemon.id")).unwrap();
    let told = daemon.cli(&["events"]).ok();
    for part in ["forgotten", owner.trim(), "machine class-02", "catalog class"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    daemon.cli(&["connection", "remove", "prod", "--forget"]).fails(3, &["there is no connection 'prod'"]);
}

#[test]
fn a_reset_that_azure_refuses_leaves_the_machine_on() {
    let (azure, daemon) = published();
    daemon.cli(&["image", "publish", "debian@1", "--connection", "prod"]).ok();
    let local = ["--ephemeral", "--places", "temp", "--count", "1"];
    create(&daemon, "class", "debian@1", D8, &local).ok();
    daemon.cli(&["machine", "start", "class-01"]).ok();
    let vm = azure.vm_of(&daemon, "class-01");

    // Refused before anything is recorded.
    azure.server.management().is_login_refused = true;
    set_secret(&daemon, "prod", "wrong").ok();
    let refused = daemon.cli(&["machine", "reset", "class-01"]);
    assert!(refused.code != 0 && refused.err.contains("its secret is wrong"), "{refused:?}");
    assert_eq!((state(&daemon, "class-01"), azure.vms()), ("running".to_owned(), vec![vm.clone()]));
    azure.server.management().is_login_refused = false;
    set_secret(&daemon, "prod", "right").ok();

    // Refused after it was recorded: the machine stays, and the next reset completes the work.
    let right = ArmFault::Refused(403, "AuthorizationFailed", "the identity has no right to do this");
    azure.hang_at("POST", "/virtualMachines/", right);
    let refused = daemon.cli(&["machine", "reset", "class-01"]);
    assert!(refused.code != 0 && refused.err.contains("AuthorizationFailed"), "{refused:?}");
    let shown = json_of(&daemon, &["machine", "show", "class-01"]);
    assert_eq!((&shown["wanted"], azure.vms()), (&json!("running"), vec![vm.clone()]), "{shown}");
    daemon.cli(&["machine", "reset", "class-01"]).ok();
    assert_eq!(state(&daemon, "class-01"), "running");
    assert_eq!(azure.vms(), std::slice::from_ref(&vm));
    // The daemon may have completed it before the command did.
    assert!(azure.server.management().machines[&vm].reimages >= 1);
}

#[test]
fn a_backup_size_is_used_while_azure_does_not_offer_the_first() {
    const E8: &str = "Standard_E8ds_v5";
    let (azure, daemon) = published();
    offer(&azure, E8);
    daemon.cli(&["image", "publish", "debian@1", "--connection", "prod"]).ok();
    create(&daemon, "class", "debian@1", D8, &["--backup-size", E8, "--count", "1"]).ok();
    azure.server.management().sizes[0].is_restricted = true;
    // The next daemon reads the sizes again.
    let daemon = Daemon::start_in(daemon.kill(), |_| {});
    daemon.cli(&["machine", "start", "class-01"]).ok();
    let shown = daemon.cli(&["machine", "show", "class-01"]).ok();
    assert!(shown.contains(E8), "{shown}");

    // Azure does not list it any more, and then none of the sizes.
    daemon.cli(&["machine", "stop", "class-01"]).ok();
    azure.server.management().sizes.retain(|size| size.name != D8);
    let daemon = Daemon::start_in(daemon.kill(), |_| {});
    daemon.cli(&["machine", "start", "class-01"]).ok();
    let told = daemon.cli(&["events"]).ok();
    assert!(told.contains("Standard_D8ds_v5: westeurope does not list this size any more"), "{told}");
    daemon.cli(&["machine", "stop", "class-01"]).ok();
    azure.server.management().sizes.clear();
    offer(&azure, "Standard_D16ds_v5");
    let daemon = Daemon::start_in(daemon.kill(), |_| {});
    let refused = daemon.cli(&["machine", "start", "class-01"]);
    assert!(refused.code != 0 && refused.err.contains("does not offer the size"), "{refused:?}");
    assert_eq!(azure.vms(), Vec::<String>::new());
}

#[test]
fn a_catalog_refuses_a_version_that_its_machines_cannot_hold() {
    const D2: &str = "Standard_D2ds_v5";
    let (azure, daemon) = published();
    offer_with(&azure, D2, "1024");
    daemon.cli(&["image", "publish", "debian@1", "--connection", "prod"]).ok();
    create(&daemon, "local", "debian@1", D2, &["--ephemeral", "--places", "temp"]).ok();
    create(&daemon, "fixed", "debian@1", D8, &["--os-disk", "1G"]).ok();
    // The next version has 1.5 GiB, nearly all of them zeroes.
    let disk = daemon.path().join("fs.raw");
    std::fs::OpenOptions::new().write(true).open(&disk).unwrap().set_len(3 << 29).unwrap();
    daemon.cli(&["image", "import", disk.to_str().unwrap(), "--name", "debian"]).ok();

    let tried = "cannot set image 'debian@2'";
    daemon.cli(&["catalog", "set", "fixed", "debian@2"]).fails(2, &[tried, "larger --os-disk"]);
    daemon.cli(&["image", "publish", "debian@2", "--connection", "prod", "--no-agent-check"]).ok();
    daemon.cli(&["catalog", "set", "local", "debian@2"]).fails(2, &[tried, D2, "2 GiB"]);
    for catalog in ["local", "fixed"] {
        assert_eq!(json_of(&daemon, &["catalog", "show", catalog])["image"], json!("debian@1"));
    }
    daemon.cli(&["catalog", "set", "local", "debian@1"]).ok();
}

#[test]
fn what_azure_cannot_do_is_refused_before_anything_is_made() {
    let (azure, daemon) = published();
    daemon.cli(&["image", "publish", "debian@1", "--connection", "prod"]).ok();
    let before = azure.resources();
    let refused = |size: &str, more: &[&str], code: i32, words: &[&str]| {
        let made = create(&daemon, "class", "debian@1", size, more);
        made.fails(code, &[&["cannot create catalog 'class'"][..], words].concat());
    };
    refused("Standard_D9ds_v5", &[], 3, &["westeurope does not offer the size 'Standard_D9ds_v5'"]);
    refused(D8, &["--ephemeral", "--places", "cache"], 2, &[D8, "cache"]);
    refused(D8, &["--ephemeral", "--places", "temp", "--os-disk", "400G"], 2, &["400 GiB"]);
    refused(D8, &["--zones", "4"], 2, &["zones are 1, 2 and 3"]);
    refused(D8, &["--persistent"], 2, &["a persistent disk is only for machines on hosts"]);
    refused(D8, &["--keep-ready", "2"], 2, &["--keep-ready is only for machines on hosts"]);
    refused(D8, &["--cpus", "4"], 2, &["--cpus is only for machines on hosts"]);
    refused(D8, &["--admin-user", "root"], 2, &["'root' cannot be the user"]);
    let without = daemon.cli(&["catalog", "create", "class", "debian", "--size", D8]);
    assert!(without.code == 2 && without.err.contains("--connection"), "{without:?}");

    create(&daemon, "class", "debian@1", D8, &["--count", "1"]).ok();
    let on_hosts = |args: &[&str], code: i32| {
        daemon.cli(args).fails(code, &["in the cloud of connection 'prod'", "machines on hosts"]);
    };
    for args in [
        &["machine", "exec", "class-01", "--", "true"][..],
        &["machine", "console", "class-01", "--log"],
        &["machine", "seal", "class-01"],
        &["machine", "set", "class-01", "--ram", "64M"],
        &["machine", "rotate", "class-01"],
        &["machine", "start", "class-01", "--record"],
        &["image", "edit", "debian", "--machine", "class-01"],
    ] {
        on_hosts(args, 4);
    }
    on_hosts(&["catalog", "roll", "class", "--to", "debian@1"], 2);
    on_hosts(&["catalog", "claim", "class", "--for", "anna"], 2);
    on_hosts(&["catalog", "set", "class", "--keep-ready", "1"], 2);
    on_hosts(&["catalog", "set", "class", "--memory", "1G"], 2);
    on_hosts(&["machine", "create", "class-07", "--catalog", "class", "--memory", "1G"], 2);
    daemon
        .cli(&["machine", "create", "class-07", "--catalog", "class", "--host-name", "a.lab.example"])
        .fails(2, &["'a.lab.example' cannot be the host name", "without '-' at the start"]);

    // A forced stop does not wait for the end of a start, and leaves nothing either.
    begin_start(&azure, &daemon, "class-01");
    let stopped = daemon.cli(&["machine", "stop", "class-01", "--force"]).ok();
    assert!(stopped.contains("class-01 is stopped"), "{stopped}");
    assert_eq!(azure.vms(), Vec::<String>::new());

    // A virtual machine of this controller that no machine has, as after a restore of an old database.
    let owner = std::fs::read_to_string(daemon.path().join("daemon.id")).unwrap();
    let orphan = format!("{GROUP}/providers/Microsoft.Compute/virtualMachines/hw-orphan");
    let vm = json!({"id": orphan, "tags": {"headwater-owner": owner.trim()}, "properties": {}});
    azure.server.management().resources.insert(orphan.clone(), vm);
    let swept = daemon.cli(&["connection", "sweep", "prod"]).ok();
    assert!(swept.contains("virtualMachines/hw-orphan: unneeded"), "{swept}");
    azure.server.management().resources.remove(&orphan);

    // The OS disk of a machine has the tags of the machine, and is needed.
    daemon.cli(&["machine", "start", "class-01"]).ok();
    assert!(azure.resources().iter().any(|path| path.contains("_OsDisk_")), "{:?}", azure.resources());
    let swept = daemon.cli(&["connection", "sweep", "prod"]).ok();
    assert!(!swept.contains("_OsDisk_"), "{swept}");
    daemon.cli(&["machine", "stop", "class-01"]).ok();

    // Azure refuses the machine: the start fails, and leaves nothing that costs.
    azure.server.management().sizes[0].is_restricted = true;
    daemon
        .cli(&["machine", "start", "class-01"])
        .fails(1, &["class-01", D8, "not offered to this subscription"]);
    let shown = daemon.cli(&["machine", "show", "class-01"]).ok();
    assert!(shown.contains("is stopped: ") && shown.contains("not offered to this subscription"), "{shown}");
    assert_eq!(azure.vms(), Vec::<String>::new());
    daemon.cli(&["machine", "remove", "class-01"]).ok();
    assert_eq!(azure.resources(), before);
}
