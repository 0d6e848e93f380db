//! Connections to Azure, and versions that are published there, against a fake Azure.

use std::path::Path;
use std::process::{Command, Stdio};

use headwater_testkit::wait_until;
use headwater_testkit_azure::arm::{ArmFault, ArmServer, FaultRule};
use headwater_testkit_azure::blob::Fault;
use serde_json::{Value, json};

use crate::support::{Daemon, Ran, headwater, pseudo_random, run};

const SUBSCRIPTION: &str = "11111111-2222-3333-4444-555555555555";
const CLIENT: &str = "66666666-7777-8888-9999-000000000000";
const SECRET: &str = "s3cret~Value";
const NEW_SECRET: &str = "n3w-Secret";
pub const GROUP: &str = "/subscriptions/11111111-2222-3333-4444-555555555555/resourceGroups/lab";

/// The fake Azure, which runs until this is dropped.
pub struct Azure {
    pub server: ArmServer,
    runtime: tokio::runtime::Runtime,
}

impl Azure {
    pub fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.unwrap();
        let server = runtime.block_on(ArmServer::start());
        // The real client waits seconds between two polls.
        (server.management().looks, server.management().replication_looks) = (1, 1);
        Self { server, runtime }
    }

    pub fn connect(&self, daemon: &Daemon, name: &str) -> Ran {
        let secret = daemon.path().join("secret.txt");
        std::fs::write(&secret, format!("{SECRET}\n")).unwrap();
        let url = self.server.url.as_str();
        let args = ["connection", "add", name, "--subscription", SUBSCRIPTION, "--tenant", "contoso.example"];
        let place = ["--group", "lab", "--region", "westeurope", "--auth", "secret", "--client-id", CLIENT];
        let services = ["--authority", url, "--management", url, "--secret-file", secret.to_str().unwrap()];
        let added = daemon.cli(&[&args[..], &place, &services].concat());
        std::fs::remove_file(secret).unwrap();
        added
    }

    /// The bodies of the requests for tokens.
    fn logins(&self) -> Vec<String> {
        self.server.management().logins.clone()
    }

    /// The paths of all resources.
    pub fn resources(&self) -> Vec<String> {
        self.server.management().resources.keys().cloned().collect()
    }

    /// Waits until a request is met by a fault that kills its client.
    pub fn wait_for_kill(&self) {
        self.runtime.block_on(self.server.killed.notified());
    }

    /// The next request to a path with this text gets no answer.
    pub fn hang_at(&self, method: &'static str, contains: &str, fault: ArmFault) {
        let rule = FaultRule { method: Some(method), contains: contains.to_owned(), skip: 0, fault };
        self.server.management().rules.push(rule);
    }
}

/// Imports a disk that is one ext4 file system with these files.
pub fn import(daemon: &Daemon, name: &str, files: &[(&str, &[u8])]) {
    let tree = tempfile::tempdir().unwrap();
    for (path, contents) in files {
        let path = tree.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, contents).unwrap();
    }
    let disk = daemon.path().join("fs.raw");
    let _ = std::fs::remove_file(&disk);
    let made = Command::new("mke2fs")
        .args(["-q", "-t", "ext4", "-d"])
        .arg(tree.path())
        .arg(&disk)
        .arg("48M")
        .status();
    assert!(made.expect("mke2fs is installed (Debian package e2fsprogs)").success());
    daemon.cli(&["image", "import", disk.to_str().unwrap(), "--name", name]).ok();
}

pub fn json_of(daemon: &Daemon, args: &[&str]) -> Value {
    serde_json::from_str(&daemon.cli(&[&["--json"], args].concat()).ok()).unwrap()
}

/// Replaces the client secret of a connection.
pub fn set_secret(daemon: &Daemon, name: &str, secret: &str) -> Ran {
    let file = daemon.path().join("secret.txt");
    std::fs::write(&file, secret).unwrap();
    let set = daemon.cli(&["connection", "set", name, "--secret-file", file.to_str().unwrap()]);
    std::fs::remove_file(file).unwrap();
    set
}

/// Begins to publish or unpublish, and leaves the command alone.
fn begin(dir: &Path, verb: &str, image: &str) {
    let mut command = headwater();
    command.arg("--data-dir").arg(dir).args(["image", verb, image, "--connection", "prod"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // It ends with its daemon.
    std::thread::spawn(move || command.status());
}

#[test]
fn a_connection_keeps_its_secret_and_says_which_right_lacks() {
    let (azure, daemon) = (Azure::start(), Daemon::start());
    azure.connect(&daemon, "prod").ok();
    azure.connect(&daemon, "prod").fails(4, &["cannot add connection 'prod'", "of that name exists"]);
    let second = ["connection", "add", "lab", "--subscription", SUBSCRIPTION, "--tenant", "contoso.example"];
    let place = ["--group", "LAB", "--region", "northeurope", "--auth", "identity"];
    daemon
        .cli(&[&second[..], &place].concat())
        .fails(4, &["cannot add connection 'lab'", "connection 'prod' has the same", "connection set prod"]);
    let shown = daemon.cli(&["connection", "show", "prod"]).ok() + &daemon.cli(&["connection", "list"]).ok();
    assert!(shown.contains(SUBSCRIPTION) && shown.contains("westeurope"), "{shown}");
    let checked = daemon.cli(&["connection", "check", "prod"]).ok();
    assert!(checked.contains("prod works: the resource group is in westeurope"), "{checked}");

    // The token of the old secret is not used any more.
    let said = set_secret(&daemon, "prod", &format!("{NEW_SECRET}\n")).ok();
    assert!(said.contains("another client secret") && !said.contains(NEW_SECRET), "{said}");
    assert_eq!(azure.logins().len(), 1);
    daemon.cli(&["connection", "check", "prod"]).ok();
    let logins = azure.logins();
    assert!(logins.len() == 2 && logins[1].contains(&format!("client_secret={NEW_SECRET}")), "{logins:?}");

    azure.server.management().rights = vec!["*/read".to_owned(), "Microsoft.Compute/disks/*".to_owned()];
    let checked = daemon.cli(&["connection", "check", "prod"]);
    assert_eq!(checked.code, 1, "{checked:?}");
    assert!(checked.out.contains("lacks: Microsoft.Compute/galleries/write"), "{checked:?}");
    assert!(!checked.out.contains("disks/write"), "{checked:?}");
    azure.server.management().is_group_missing = true;
    daemon
        .cli(&["connection", "check", "prod"])
        .fails(3, &["connection 'prod' does not work", "ResourceGroupNotFound", "create the resource group"]);

    // The secrets are nowhere except, encrypted, in the database.
    let told = daemon.cli(&["events"]).ok() + &json_of(&daemon, &["connection", "list"]).to_string() + &shown;
    assert!(told.contains("connection prod") && told.contains("another client secret"), "{told}");
    assert!(!told.contains(SECRET) && !told.contains(NEW_SECRET), "{told}");
    assert_eq!(daemon.count_in_log(SECRET) + daemon.count_in_log(NEW_SECRET), 0);
    let (_, dir) = daemon.terminate();
    for file in ["headwater.db", "headwater.db-wal"] {
        let bytes = std::fs::read(dir.path().join(file)).unwrap_or_default();
        for secret in [SECRET, NEW_SECRET] {
            assert!(!bytes.windows(secret.len()).any(|part| part == secret.as_bytes()), "{file}");
        }
    }
    let daemon = Daemon::start_in(dir, |_| {});
    azure.server.management().is_group_missing = false;
    assert_eq!(daemon.cli(&["connection", "check", "prod"]).code, 1);
    daemon.cli(&["connection", "remove", "prod"]).ok();
    daemon.cli(&["connection", "check", "prod"]).fails(3, &["there is no connection 'prod'"]);
}

#[test]
fn odd_connections_are_refused() {
    let daemon = Daemon::start();
    let add_in = |region: &str, name: &str, more: &[&str]| {
        let place = ["--subscription", SUBSCRIPTION, "--tenant", "t", "--group", "lab", "--region", region];
        daemon.cli(&[&["connection", "add", name], &place[..], more].concat())
    };
    let add = |name: &str, more: &[&str]| add_in("westeurope", name, more);
    add("prod", &["--auth", "secret"]).fails(2, &["a client secret is missing", "--secret-file"]);
    add("prod", &["--auth", "workload"]).fails(2, &["client ID", "--client-id"]);
    add("prod", &["--auth", "workload", "--client-id", CLIENT]).fails(1, &["AZURE_FEDERATED_TOKEN_FILE"]);
    add("Prod", &["--auth", "identity"]).fails(2, &["'Prod' is not a connection name"]);
    add("prod", &["--auth", "identity", "--authority", "http://login.example"]).fails(2, &["not an https"]);
    add_in("West Europe", "prod", &["--auth", "identity"]).fails(2, &["'West Europe' is not a region"]);
    add("prod", &["--auth", "secret", "--secret-file", "/nowhere"]).fails(3, &["cannot read", "/nowhere"]);
    assert_eq!(json_of(&daemon, &["connection", "list"])["connections"], json!([]));

    add("vm", &["--auth", "identity"]).ok();
    set_secret(&daemon, "vm", NEW_SECRET).fails(4, &["connection 'vm'", "'identity'", "--auth secret"]);
    set_secret(&daemon, "vm", " \n").fails(2, &["connection 'vm'", "the client secret is empty"]);
    set_secret(&daemon, "prod", NEW_SECRET).fails(3, &["there is no connection 'prod'"]);
}

#[test]
fn a_version_is_published_though_the_daemon_is_killed() {
    let (azure, daemon) = (Azure::start(), Daemon::start());
    azure.connect(&daemon, "prod").ok();
    let data = pseudo_random(20 << 20, 7);
    let files: [(&str, &[u8]); 3] =
        [("usr/bin/cloud-init", b"#!"), ("usr/lib/os-release", b"ID=debian\n"), ("srv/data", &data)];
    import(&daemon, "debian", &files);

    // Killed before the upload.
    azure.hang_at("POST", "beginGetAccess", ArmFault::KillBefore);
    begin(daemon.path(), "publish", "debian@1");
    azure.wait_for_kill();
    let dir = daemon.kill();
    // Killed in the middle of the upload: from this request on, the service is unavailable.
    let blob = azure.server.management().blobs[0].clone();
    blob.lock().unwrap().faults.extend((6..10_000).map(|number| (number, Fault::Status(503))));
    let daemon = Daemon::start_in(dir, |_| {});
    wait_until("the upload is under way", || blob.lock().unwrap().seen.len() > 8);
    let written = blob.lock().unwrap().pages.len();
    assert!(written > 0, "no page was written");
    let dir = daemon.kill();
    // Killed while the version is made.
    blob.lock().unwrap().faults.clear();
    azure.hang_at("PUT", "/versions/", ArmFault::KillAfter);
    let daemon = Daemon::start_in(dir, |_| {});
    azure.wait_for_kill();
    let dir = daemon.kill();

    let daemon = Daemon::start_in(dir, |_| {});
    let task = json_of(&daemon, &["task", "list"])["tasks"][0].clone();
    assert_eq!((&task["kind"], &task["subject"]), (&json!("publish"), &json!("image debian@1")), "{task}");
    daemon.cli(&["task", "wait", &task["id"].to_string()]).ok();
    let listed = daemon.cli(&["image", "published", "debian"]).ok();
    assert!(listed.contains("debian@1") && listed.contains("published"), "{listed}");

    // Each resource was made once, and the disk of the upload is gone.
    let resources = azure.resources();
    assert_eq!(resources.len(), 3, "{resources:?}");
    assert!(resources[2].ends_with("/images/debian/versions/1.0.1"), "{resources:?}");
    assert!(azure.server.management().created.values().all(|times| *times == 1));
    // The bytes are those of the export.
    let vhd = daemon.path().join("debian.vhd");
    daemon.cli(&["image", "export", "debian@1", vhd.to_str().unwrap(), "--format", "vhd-fixed"]).ok();
    assert!(blob.lock().unwrap().bytes() == std::fs::read(&vhd).unwrap(), "the blob differs from the export");

    // It is published already; another version of that number is refused; a connection in use stays.
    let again = daemon.cli(&["image", "publish", "debian@1", "--connection", "prod"]).ok();
    assert!(again.contains("is published to prod already"), "{again}");
    let with = |replicas: &str| {
        daemon.cli(&["image", "publish", "debian@1", "--connection", "prod", "--replicas", replicas])
    };
    assert!(with("1").ok().contains("already"));
    with("2").fails(
        4,
        &["with 2 replica(s)", "it is published there with 1", "leave out --replicas", "unpublish"],
    );
    daemon.cli(&["connection", "remove", "prod"]).fails(4, &["debian@1", "image unpublish"]);
    // Somebody removes it in Azure.
    let version = azure.resources().pop().unwrap();
    assert!(azure.server.management().resources.remove(&version).is_some());
    let again = daemon.cli(&["image", "publish", "debian@1", "--connection", "prod"]);
    assert!(again.err.contains("was removed there meanwhile"), "{again:?}");
    assert!(again.ok().contains("debian@1 is published to prod: generation"));
    assert!(azure.resources().contains(&version));
    daemon.cli(&["image", "remove", "debian"]).ok();
    import(&daemon, "debian", &files[..2]);
    daemon
        .cli(&["image", "publish", "debian@1", "--connection", "prod"])
        .fails(4, &["another version of this number is there", "unpublish debian@1"]);

    // Killed while the version is removed.
    azure.hang_at("DELETE", "/versions/", ArmFault::KillBefore);
    begin(daemon.path(), "unpublish", "debian@1");
    azure.wait_for_kill();
    let dir = daemon.kill();
    let daemon = Daemon::start_in(dir, |_| {});
    let task = json_of(&daemon, &["task", "list"])["tasks"][0].clone();
    assert_eq!(task["kind"], "unpublish", "{task}");
    daemon.cli(&["task", "wait", &task["id"].to_string()]).ok();
    assert_eq!(azure.resources(), Vec::<String>::new());
    daemon.cli(&["image", "unpublish", "debian@1", "--connection", "prod"]).fails(3, &["is not published"]);
    daemon.cli(&["connection", "remove", "prod"]).ok();
}

#[test]
fn what_azure_could_not_boot_is_refused_before_anything_is_made() {
    let (azure, daemon) = (Azure::start(), Daemon::start());
    azure.connect(&daemon, "prod").ok();
    import(&daemon, "bare", &[("usr/lib/os-release", b"ID=debian\n")]);
    let local = b"datasource_list: [NoCloud]\n";
    import(
        &daemon,
        "local",
        &[("usr/bin/cloud-init", b"#!"), ("etc/os-release", b"x"), ("etc/cloud/cloud.cfg", local)],
    );
    let publish = |image: &str, more: &[&str]| {
        daemon.cli(&[&["image", "publish", image, "--connection", "prod"], more].concat())
    };
    publish("bare@1", &[])
        .fails(2, &["cannot publish bare@1", "no program that reports", "--no-agent-check"]);
    publish("local@1", &[]).fails(2, &["no data source for Azure", "cloud.cfg lists [NoCloud]"]);
    publish("nothing@1", &[]).fails(3, &["nothing"]);
    assert_eq!(publish("bare@1", &["--replicas", "0"]).code, 2);
    daemon.cli(&["image", "retire", "bare@1"]).ok();
    publish("bare@1", &["--no-agent-check"]).fails(4, &["it is retired", "--undo"]);
    daemon.cli(&["image", "retire", "bare@1", "--undo"]).ok();
    azure.server.management().rights = vec!["*/read".to_owned()];
    publish("bare@1", &["--no-agent-check"])
        .fails(1, &["lacks Microsoft.Compute/disks/write", "Contributor"]);
    assert_eq!(azure.resources(), Vec::<String>::new());
    assert_eq!(json_of(&daemon, &["image", "published"])["published"], json!([]));

    // The gallery and the definition of the image are looked at before anything is sent.
    azure.server.management().rights = vec!["*".to_owned()];
    let owner = std::fs::read_to_string(daemon.path().join("daemon.id")).unwrap();
    let short: String = owner.trim().chars().take(12).collect();
    let gallery = format!("{GROUP}/providers/Microsoft.Compute/galleries/headwater_{short}");
    for path in [gallery.clone(), format!("{gallery}/images/bare")] {
        for (owner, why) in [("another controller", "has not created"), (owner.trim(), "other properties")] {
            let there = json!({"id": path, "tags": {"headwater-owner": owner}, "properties": {}});
            azure.server.management().resources.insert(path.clone(), there);
            publish("bare@1", &["--no-agent-check"]).fails(4, &["cannot publish bare@1", &path, why]);
        }
        azure.server.management().resources.clear();
    }
    assert!(azure.server.management().created.is_empty());
    assert_eq!(json_of(&daemon, &["image", "published"])["published"], json!([]));

    let begin = || {
        azure.hang_at("POST", "beginGetAccess", ArmFault::KillBefore);
        let mut command = headwater();
        let publish = ["image", "publish", "bare@1", "--connection", "prod", "--no-agent-check"];
        command.arg("--data-dir").arg(daemon.path()).args(publish);
        let begun = std::thread::spawn(move || run(&mut command));
        azure.wait_for_kill();
        begun
    };
    let cancel = || {
        let tasks = json_of(&daemon, &["task", "list", "--unended"]);
        daemon.cli(&["task", "cancel", &tasks["tasks"][0]["id"].to_string()]).ok();
    };
    // A cancelled task leaves nothing there.
    let cancelled = begin();
    assert_eq!(azure.resources().len(), 1);
    daemon
        .cli(&["connection", "remove", "prod"])
        .fails(4, &["(publish image bare@1) has not ended", "headwater task wait"]);
    for what in ["bare@1", "bare"] {
        daemon.cli(&["image", "remove", what]).fails(4, &["cannot remove", "task", "publishes it"]);
    }
    cancel();
    cancelled.join().unwrap().fails(130, &["the task was cancelled"]);
    assert_eq!(azure.resources(), Vec::<String>::new());
    assert_eq!(json_of(&daemon, &["image", "published"])["published"], json!([]));

    // If Azure does not remove it, it stays in the list, and the message says how it is removed later.
    let cancelled = begin();
    azure.hang_at("DELETE", "/disks/", ArmFault::Refused(403, "AuthorizationFailed", "no right"));
    cancel();
    let told = ["could not be removed", "AuthorizationFailed", "image unpublish bare@1 --connection prod"];
    cancelled.join().unwrap().fails(130, &told);
    assert_eq!(azure.resources().len(), 1);
    let listed = json_of(&daemon, &["image", "published"])["published"].clone();
    assert_eq!((&listed[0]["version"], &listed[0]["state"]), (&json!(1), &json!("removing")), "{listed}");
    daemon.cli(&["image", "unpublish", "bare@1", "--connection", "prod"]).ok();
    assert_eq!(azure.resources(), Vec::<String>::new());
    assert_eq!(json_of(&daemon, &["image", "published"])["published"], json!([]));
    daemon.cli(&["connection", "remove", "prod"]).ok();
}

#[test]
fn a_sweep_lists_own_resources_that_nothing_needs() {
    let (azure, daemon) = (Azure::start(), Daemon::start());
    azure.connect(&daemon, "prod").ok();
    assert!(daemon.cli(&["connection", "sweep", "prod"]).ok().contains("nothing there is unneeded"));
    let owner = std::fs::read_to_string(daemon.path().join("daemon.id")).unwrap();
    let disk = |name: &str, owner: &str| {
        let path = format!("{GROUP}/providers/Microsoft.Compute/disks/{name}");
        let tags = json!({"headwater-owner": owner.trim()});
        let disk = json!({"id": path, "name": name, "tags": tags, "properties": {"diskState": "Unattached"}});
        azure.server.management().resources.insert(path, disk);
    };
    disk("ours", &owner);
    disk("theirs", "another controller");
    azure.server.management().resources.insert(
        format!("{GROUP}/providers/Microsoft.Compute/disks/untagged"),
        json!({"name": "untagged", "properties": {}}),
    );
    // It was seen only now, so it stays.
    for remove in [&[][..], &["--remove"]] {
        let swept = daemon.cli(&[&["connection", "sweep", "prod"], remove].concat()).ok();
        assert!(swept.contains("disks/ours: unneeded") && swept.contains("wait 30 minutes"), "{swept}");
        assert!(!swept.contains("theirs") && !swept.contains("untagged"), "{swept}");
    }
    assert_eq!(azure.resources().len(), 3);
}
