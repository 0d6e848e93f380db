//! Firmware, TPM, display and network of machines: guests that boot by UEFI, with Secure Boot too, show something, and send packets through a bridge.

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::support::{Daemon, headwater, http, is_alive, run, short_dir};
use headwater_testkit::wait_until;

/// The firmware, display and network that most machines of these tests have.
const PLATFORM: [&str; 6] = ["--firmware", "uefi", "--display", "vnc", "--network", "bridge:br0"];

fn tool(command: &mut Command) {
    let ran = run(command);
    assert_eq!(ran.code, 0, "{command:?}: {ran:?}");
}

/// A disk that only UEFI boots: an EFI system partition with iPXE, which says so on the screen and asks the network for an address.
fn efi_disk(dir: &Path) -> PathBuf {
    efi_disk_of(dir, "efi.raw", &[("/usr/lib/ipxe/ipxe.efi", "/EFI/BOOT/BOOTX64.EFI")])
}

/// A disk that UEFI boots with Secure Boot: Debian's shim, which Microsoft signed, and Debian's GRUB, which says whether it is locked down.
fn signed_disk(dir: &Path) -> PathBuf {
    let config = dir.join("grub.cfg");
    std::fs::write(&config, "echo lockdown: $lockdown\necho login:\nsleep 3600\n")
        .expect("it can be written");
    let files = [
        ("/usr/lib/shim/shimx64.efi.signed", "/EFI/BOOT/BOOTX64.EFI"),
        ("/usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed", "/EFI/BOOT/grubx64.efi"),
        (config.to_str().expect("UTF-8"), "/EFI/debian/grub.cfg"),
    ];
    efi_disk_of(dir, "signed.raw", &files)
}

/// A disk whose loader is signed, by a key that the firmware does not have: GRUB without the shim that brings Debian's key.
fn untrusted_disk(dir: &Path) -> PathBuf {
    let grub = "/usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed";
    efi_disk_of(dir, "untrusted.raw", &[(grub, "/EFI/BOOT/BOOTX64.EFI")])
}

fn efi_disk_of(dir: &Path, name: &str, files: &[(&str, &str)]) -> PathBuf {
    let disk = dir.join(name);
    std::fs::File::create(&disk).and_then(|file| file.set_len(8 << 20)).expect("the disk can be written");
    let script = "printf 'label: gpt\\nstart=2048, size=12288, type=U\\n' | sfdisk --quiet \"$0\"";
    tool(Command::new("sh").args(["-c", script]).arg(&disk));
    let partition = format!("{}@@1M", disk.display());
    tool(Command::new("mformat").args(["-i", &partition, "-T", "12288", "::"]));
    tool(Command::new("mmd").args(["-i", &partition, "::/EFI", "::/EFI/BOOT", "::/EFI/debian"]));
    for (file, path) in files {
        tool(Command::new("mcopy").args(["-i", &partition, file, &format!("::{path}")]));
    }
    disk
}

fn import(daemon: &Daemon) {
    let disk = efi_disk(daemon.path());
    daemon.cli(&["image", "import", disk.to_str().expect("UTF-8")]).ok();
}

/// Width, height and the number of colours of a PNG, as Python reads it.
fn picture(path: &Path) -> (u32, u32, u32) {
    let script = "import struct, sys, zlib\n\
        data = open(sys.argv[1], 'rb').read()\n\
        assert data[:8] == bytes([137, 80, 78, 71, 13, 10, 26, 10]) and data[12:16] == b'IHDR' and data[37:41] == b'IDAT'\n\
        width, height, depth, kind = struct.unpack('>IIBB', data[16:26])\n\
        assert (depth, kind) == (8, 2)\n\
        rows = zlib.decompress(data[41:41 + struct.unpack('>I', data[33:37])[0]])\n\
        step = 1 + 3 * width\n\
        assert len(rows) == height * step\n\
        colours = {rows[y * step + x:y * step + x + 3] for y in range(height) for x in range(1, step, 3)}\n\
        print(width, height, len(colours))\n";
    let said = run(Command::new("python3").args(["-c", script]).arg(path)).ok();
    let numbers: Vec<u32> = said.split_whitespace().map(|word| word.parse().expect("a number")).collect();
    (numbers[0], numbers[1], numbers[2])
}

#[test]
fn a_uefi_guest_shows_a_picture_and_sends_through_its_bridge() {
    let daemon = Daemon::start_with_bridge();
    import(&daemon);
    daemon.create("lab", "efi", &PLATFORM);
    daemon.cli(&["machine", "start", "lab"]).ok();
    let lab = daemon.machine("lab");
    let (uuid, mac) = (lab["uuid"].as_str().unwrap(), lab["mac"].as_str().unwrap());
    let tap = format!("hw{}", &uuid.replace('-', "")[..13]);
    let ports = || daemon.in_network(&["ip", "-brief", "link", "show", "master", "br0"]).ok();
    assert!(ports().starts_with(&tap) && ports().lines().count() == 1, "{}", ports());

    // The display is a socket for the owner alone, and nothing of the machine listens on the network.
    let socket = PathBuf::from(lab["display_socket"].as_str().unwrap());
    assert_eq!(socket, daemon.path().join("run/lab/vnc.sock"));
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    let mut greeting = [0; 12];
    UnixStream::connect(&socket).unwrap().read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"RFB 003.008\n");
    for table in ["tcp", "tcp6", "udp", "udp6"] {
        let sockets = std::fs::read_to_string(format!("/proc/{}/net/{table}", lab["pid"])).unwrap();
        assert_eq!(sockets.lines().count(), 1, "{sockets}");
    }

    // The guest sends from its card: the bridge learns the address at the tap.
    wait_until("the bridge has seen the guest", || {
        let learned = daemon.in_network(&["bridge", "fdb", "show", "br", "br0"]).ok();
        learned.lines().any(|line| line.starts_with(&format!("{mac} dev {tap} ")))
    });
    let console = daemon.cli(&["machine", "console", "lab", "--log"]).ok();
    assert!(console.contains("iPXE initialising devices"), "{console}");
    let png = daemon.path().join("screen.png");
    std::fs::write(&png, "what was there before").unwrap();
    daemon.cli(&["machine", "screenshot", "lab", png.to_str().unwrap()]).ok();
    let (width, height, colours) = picture(&png);
    assert!(width >= 640 && height >= 400 && colours >= 2, "{width} x {height}, {colours} colours");

    let shown = daemon.cli(&["machine", "show", "lab"]).ok();
    for words in ["uefi", "vnc, unix socket ", "a port of bridge br0"] {
        assert!(shown.contains(words), "{shown}");
    }
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    assert_eq!(ports(), "");
    assert_eq!(daemon.machine("lab").get("display_socket"), None);
    let mut left: Vec<_> = std::fs::read_dir(daemon.path().join("run/lab"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["console.log", "qemu.log"]);
}

#[test]
fn firmware_variables_are_kept_with_the_disk() {
    let daemon = Daemon::start();
    import(&daemon);
    daemon.create("lab", "efi", &["--firmware", "uefi", "--persistent"]);
    let kept = || {
        let entries = std::fs::read_dir(daemon.path().join("run/lab")).unwrap();
        let mut paths = entries.map(|entry| entry.unwrap().path());
        let found = paths.find(|path| path.extension().is_some_and(|end| end == "kept-vars"));
        found.expect("it is kept")
    };
    let cycle = |verb: &str| {
        daemon.cli(&["machine", verb, "lab"]).ok();
        daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    };
    cycle("start");
    let first = kept();
    assert_eq!(std::fs::metadata(&first).unwrap().permissions().mode() & 0o777, 0o600);
    // In the last bytes, which the firmware never uses.
    let mut marked = std::fs::read(&first).unwrap();
    let end = marked.len() - 4;
    marked[end..].copy_from_slice(b"mark");
    std::fs::write(&first, &marked).unwrap();
    cycle("start");
    assert!(kept() == first && std::fs::read(&first).unwrap().ends_with(b"mark"));
    daemon.cli(&["machine", "reset", "lab"]).ok();
    assert!(!first.exists());
    cycle("start");
    assert!(!std::fs::read(kept()).unwrap().ends_with(b"mark"));
}

#[test]
fn secure_boot_runs_a_signed_loader_and_says_that_another_is_not_trusted() {
    let daemon = Daemon::start();
    for disk in [signed_disk, untrusted_disk, efi_disk].map(|make| make(daemon.path())) {
        daemon.cli(&["image", "import", disk.to_str().expect("UTF-8")]).ok();
    }
    // GRUB needs more than the other machines of these tests.
    let secure = ["--secure-boot", "--tpm", "--memory", "256M", "--disk", "1G"];
    daemon.cli(&[&["machine", "create", "trusted", "signed", "--persistent"][..], &secure].concat()).ok();
    daemon.cli(&[&["machine", "create", "refused", "untrusted"][..], &secure].concat()).ok();
    daemon.cli(&["machine", "start", "trusted", "refused"]).ok();
    // Nobody signed this loader, which is seen before anything starts.
    daemon.cli(&[&["machine", "create", "unsigned", "efi"][..], &secure].concat()).ok();
    let start = daemon.cli(&["machine", "start", "unsigned"]);
    start.fails(
        2,
        &["Secure Boot cannot boot efi@1", "\\EFI\\BOOT\\BOOTX64.EFI is not signed", "shim-signed"],
    );
    assert!(!daemon.path().join("run/unsigned/qemu.log").exists());
    let shown = daemon.cli(&["machine", "show", "trusted"]).ok();
    assert!(shown.contains("uefi with Secure Boot") && shown.contains("2.0, swtpm"), "{shown}");

    let start = daemon.cli(&["machine", "start", "refused", "--wait"]);
    start.fails(1, &["Access Denied: Secure Boot does not trust the loader", "shim-signed"]);
    daemon.cli(&["machine", "start", "trusted", "--wait"]).ok();
    let console = daemon.cli(&["machine", "console", "trusted", "--log"]).ok();
    assert!(console.contains("lockdown: y"), "{console}");

    let tpm_of = |machine: &str| {
        let line = std::fs::read_to_string(daemon.path().join("run").join(machine).join("tpm.pid")).unwrap();
        line.split(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let tpms = ["trusted", "refused"].map(tpm_of);
    assert!(tpms.iter().all(|tpm| is_alive(*tpm)));
    daemon.cli(&["machine", "stop", "trusted", "refused", "--force"]).ok();
    assert!(!tpms.iter().any(|tpm| is_alive(*tpm)));
    // The TPM stays with a disk that is kept, and goes with it.
    let left = |machine: &str| {
        let entries = std::fs::read_dir(daemon.path().join("run").join(machine)).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut ends: Vec<String> = names.map(|name| name.split_once('.').unwrap().1.to_owned()).collect();
        ends.sort();
        ends
    };
    assert_eq!(left("refused"), ["log", "log", "log"]);
    assert_eq!(left("trusted"), ["kept-tpm", "kept-vars", "log", "log", "log"]);
    daemon.cli(&["machine", "reset", "trusted"]).ok();
    assert_eq!(left("trusted"), ["log", "log", "log"]);
}

#[test]
fn secure_boot_without_uefi_and_a_tpm_without_swtpm_are_refused() {
    // QEMU is there, and swtpm is not.
    let dir = short_dir();
    let bin = dir.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    for tool in ["qemu-system-x86_64", "setpriv"] {
        std::os::unix::fs::symlink(Path::new("/usr/bin").join(tool), bin.join(tool)).unwrap();
    }
    let daemon = Daemon::start_in(dir, |command| {
        command.env("PATH", bin);
    });
    daemon.with_tiny_machine("plain");
    let create = |more: &[&str]| daemon.cli(&[&["machine", "create", "lab", "tiny"][..], more].concat());
    create(&["--firmware", "bios", "--secure-boot"]).fails(2, &["machine 'lab'", "give --firmware uefi"]);
    create(&["--tpm"]).fails(1, &["'swtpm' is not installed", "apt-get install swtpm"]);
    let catalog = ["catalog", "create", "labs", "tiny", "--tpm"];
    daemon.cli(&catalog).fails(1, &["catalog 'labs'", "apt-get install swtpm"]);
    create(&["--tpm=false"]).ok();
    assert_eq!(daemon.machine("lab")["tpm"], false);
}

#[test]
fn a_screenshot_needs_a_display_and_a_machine_that_is_on() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("dark");
    daemon.create("lit", "tiny", &["--display", "vnc"]);
    let png = daemon.path().join("screen.png");
    let screenshot = |name: &str| daemon.cli(&["machine", "screenshot", name, png.to_str().unwrap()]);
    screenshot("dark").fails(4, &["screenshot of machine 'dark'", "has no display", "--display vnc"]);
    screenshot("lit").fails(4, &["screenshot of machine 'lit'", "headwater machine start lit"]);
    assert!(!png.exists());
    daemon.cli(&["machine", "start", "lit", "--wait"]).ok();
    // SeaBIOS shows its own lines, and `-` is standard output.
    screenshot("lit").ok();
    let (width, height, colours) = picture(&png);
    assert!((width, height) >= (640, 400) && colours >= 2, "{width} x {height}, {colours} colours");
    let mut command = headwater();
    command.arg("--data-dir").arg(daemon.path()).args(["machine", "screenshot", "lit", "-"]);
    assert!(command.output().unwrap().stdout.starts_with(b"\x89PNG\r\n\x1a\n"));
}

#[test]
fn a_network_that_this_host_does_not_have_is_refused() {
    let daemon = Daemon::start_with_bridge();
    daemon.with_tiny_machine("plain");
    let create = |network: &str| daemon.cli(&["machine", "create", "lab", "tiny", "--network", network]);
    create("bridge:br1").fails(2, &["bridge 'br1'", "no such interface", "ip link add br1 type bridge"]);
    create("bridge:lo").fails(2, &["bridge 'lo'", "not a bridge"]);
    let catalog = ["catalog", "create", "labs", "tiny", "--network", "bridge:br1"];
    daemon.cli(&catalog).fails(2, &["catalog 'labs'", "bridge 'br1'", "no such interface"]);
    daemon.in_network(&["ip", "link", "set", "br0", "down"]).ok();
    create("bridge:br0").fails(2, &["bridge 'br0'", "is down", "ip link set br0 up"]);
    daemon.in_network(&["ip", "link", "set", "br0", "up"]).ok();
    create("bridge:br0").ok();
    // It is there when the machine is made, and gone when it starts.
    daemon.in_network(&["ip", "link", "delete", "br0"]).ok();
    daemon
        .cli(&["machine", "start", "lab"])
        .fails(2, &["machine 'lab'", "bridge 'br0'", "no such interface"]);
    assert_eq!(daemon.machine("lab")["state"], "stopped");
}

#[test]
fn a_user_without_rights_is_told_so_when_a_bridge_is_named() {
    let daemon = Daemon::start_as_user(65534);
    let disk = daemon.path().join("tiny.raw");
    std::fs::write(&disk, crate::support::tiny_disk()).unwrap();
    daemon.cli(&["image", "import", disk.to_str().unwrap()]).ok();
    let created = daemon.cli(&["machine", "create", "lab", "tiny", "--network", "bridge:br0"]);
    created.fails(2, &["bridge 'br0'", "CAP_NET_ADMIN", "root"]);
}

#[test]
fn machines_have_the_platform_of_their_catalog() {
    let daemon = Daemon::start_with_bridge();
    daemon.with_tiny_machine("plain");
    let plain = daemon.machine("plain");
    assert_eq!(
        (&plain["firmware"], &plain["display"], &plain["network"]),
        (&"bios".into(), &"none".into(), &"user".into())
    );
    daemon.cli(&[&["catalog", "create", "labs", "tiny", "--count", "1"][..], &PLATFORM].concat()).ok();
    let member = daemon.machine("labs-01");
    let of =
        |machine: &serde_json::Value| json!([machine["firmware"], machine["display"], machine["network"]]);
    assert_eq!(of(&member), json!(["uefi", "vnc", "bridge:br0"]));
    let shown = daemon.cli(&["catalog", "show", "labs"]).ok();
    assert!(shown.contains("a port of bridge br0"), "{shown}");
    daemon
        .cli(&["machine", "create", "own", "--catalog", "labs", "--network", "user", "--display", "none"])
        .ok();
    assert_eq!(of(&daemon.machine("own")), json!(["uefi", "none", "user"]));

    let target = ["machine", "create", "pc", "tiny", "--boot", "network", "--mac", "52:54:00:12:34:56"];
    let refused = daemon.cli(&[&target[..], &["--cache", "ram", "--display", "vnc"]].concat());
    refused.fails(2, &["machine 'pc'", "--network and --scratch"]);
    let odd = json!({ "name": "odd", "image": "tiny", "network": "bridge:a/b" }).to_string();
    let (status, answer) = http(&daemon.socket(), "POST", "/api/v1/machines", Some(&odd));
    assert!(status == 400 && answer.contains("not the name of a bridge"), "{status}: {answer}");
}

#[test]
fn a_scratch_disk_is_empty_at_each_start_and_in_no_version() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("plain");
    let create = |more: &[&str]| daemon.cli(&[&["machine", "create", "lab", "tiny"][..], more].concat());
    create(&["--scratch", "1M"]).fails(2, &["machine 'lab'", "from 64M to 4T"]);
    daemon.create("lab", "tiny", &["--scratch", "64M", "--transport", "nbd", "--persistent"]);
    let socket = daemon.path().join("run/lab/scratch.sock");
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let io = |command: &str| {
        let mut io = Command::new("qemu-io");
        io.args(["--format", "raw", "-c", command, &uri]);
        let said = run(&mut io).ok();
        assert!(!said.contains("failed"), "{said}");
    };
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    let shown = daemon.cli(&["machine", "show", "lab"]).ok();
    assert!(
        shown.lines().any(|line| line.starts_with("scratch disk ") && line.ends_with(" 64.0 MiB")),
        "{shown}"
    );
    assert_eq!(run(Command::new("nbdinfo").args(["--size", &uri])).ok().trim(), (64 << 20).to_string());
    io("write -P 7 16M 1M");
    io("read -P 7 16M 1M");
    // The version has the machine's disk, and nothing of this one.
    daemon.console("lab", "w", Some("W"));
    let sealed = daemon.cli(&["machine", "seal", "lab"]).ok();
    assert!(sealed.contains("tiny@2"), "{sealed}");
    let image: serde_json::Value =
        serde_json::from_str(&daemon.cli(&["--json", "image", "show", "tiny"]).ok()).unwrap();
    let sizes: Vec<u64> =
        image["versions"].as_array().unwrap().iter().map(|it| it["size_bytes"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [sizes[0]; 2], "{image}");
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    assert!(!socket.exists());
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    io("read -P 0 0 64M");
    // Over vhost-user, QEMU asks the server for the disk before it runs the guest.
    daemon.create("desk", "tiny", &["--scratch", "64M"]);
    daemon.cli(&["machine", "start", "desk", "--wait"]).ok();
    daemon.cli(&["machine", "stop", "lab", "desk", "--force"]).ok();
    // Its own cache is gone; a disk that is kept has a file.
    let left = std::fs::read_dir(daemon.path().join("cache")).unwrap().count();
    daemon.cli(&["machine", "remove", "lab"]).ok();
    assert!(left > 0 && std::fs::read_dir(daemon.path().join("cache")).unwrap().count() == 0);
}
