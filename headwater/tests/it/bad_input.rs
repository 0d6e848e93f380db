//! Bad input ends in a clear error and a non-zero exit, and leaves nothing behind: where each kind is tested, and
//! tests of those of `export` on the command line.
//!
//! | bad input | test |
//! |---|---|
//! | truncated qcow2 | `images.rs`: what_is_no_image_is_refused_and_leaves_nothing |
//! | qcow2 with a missing backing file | the same; image `files.rs`: a_missing_or_circular_backing_file_is_named |
//! | LUKS-encrypted qcow2 | the same; image `files.rs`: encrypted_images_are_refused_at_every_place_of_a_chain |
//! | file that is no image | the same; image `files.rs`: files_that_cannot_be_disks_are_refused_with_the_reason |
//! | size not a multiple of 512 | the same; here: a_disk_of_an_odd_size |
//! | import into a full disk | `images.rs`: an_import_into_a_full_disk_fails_as_such_and_leaves_nothing |
//! | unknown image or version | `cli.rs`: bad_names_and_sizes_are_refused_with_advice; `api.rs`: every_failure_is_a_problem_with_the_right_status |
//! | name with odd characters | the same two |
//! | broken table of sizes, scheme that contradicts itself, OS disk larger than every place | `sizes.rs`; sizes `table.rs`, `scheme.rs` |
//! | second daemon on one data directory | `restart.rs`: a_second_daemon_is_refused_and_the_first_goes_on |
//! | socket path in use or too long | `restart.rs`: a_socket_that_cannot_be_is_refused; here: a_socket_that_cannot_be; nbd `addresses.rs` |
//! | port in use | `restart.rs`: tcp_is_for_loopback_and_a_port_in_use_is_said; here: a_port_in_use |
//! | request that makes no sense | here: what_makes_no_sense_is_2_and_invalid; `stores.rs`: `store serve` |
//! | RAM larger than the machine | `cli.rs`: bad_names_and_sizes_are_refused_with_advice, run_of_what_does_not_exist_or_cannot_be_says_so |
//! | overflow directory missing, read-only or too small | here: an_overflow_directory_that_cannot_be_used; full later: volume `ladder.rs`, `space.rs` |
//! | overflow device with a file system, or smaller than its limit | here: a_device_that_others_use_or_that_is_too_small_is_no_overflow; writecache `signature.rs` |
//! | QEMU not installed | `machines.rs`: qemu_that_is_not_installed_is_said_and_leaves_nothing |
//! | NBD client that sends garbage, huge lengths, past the end | nbd `hostile.rs`: a_handshake_of_garbage_ends_the_connection, a_huge_option_is_refused_without_taking_it, requests_that_do_not_fit_are_answered_and_leave_the_stream_in_step, a_write_longer_than_the_limit_ends_the_connection |
//! | NBD client that hangs up in the middle of a write | nbd `hostile.rs`: hanging_up_in_the_middle_of_a_write_writes_nothing |
//! | damaged or cut manifest, object, list of versions | image `damage.rs`; `images.rs`: damage_that_cannot_be_repaired_is_told_with_who_it_touches_by_verify_and_by_the_scrub; store `local_dir.rs`: a_damaged_list_of_versions_hides_no_other_image |
//! | damaged chunk cache | image `disk_cache/tests.rs`, `disk_cache/stores.rs` |
//! | manifest that points outside its object or claims 2^63 bytes, zip-bomb chunk | image `fuzzing.rs`: manifest, chunk; image `damage.rs` |
//! | server that lies | remote `servers.rs`: a_server_with_wrong_bytes_is_put_aside_and_others_continue, metadata_that_is_wrong_on_one_server_comes_from_another; `streaming.rs`: a_server_that_lies_is_told_of_and_costs_no_read_unless_it_is_the_only_one |
//! | store full | store `full_disk.rs`; `images.rs`: an_import_into_a_full_disk_fails_as_such_and_leaves_nothing; `space.rs`: a_seal_into_a_full_store_loses_nothing |
//! | two writers on one image | store `local_dir.rs`: only_one_writes_at_a_time; store `s3.rs` |
//! | clock set back | service `lifecycle/tests/promotions.rs`: a_promotion_is_carried_out_once_when_the_clock_has_reached_its_time |
//! | promotion of a version that is being removed | `channels.rs`: a_version_is_promoted_or_removed_and_never_both; store `suite/mod.rs` |

use std::path::Path;
use std::process::Command;

use crate::support::{Ran, headwater, run, short_dir};

fn export(dir: &Path, source: &str, more: &[&str]) -> Ran {
    run(headwater().current_dir(dir).args(["export", source]).args(more))
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    entries.map(|name| name.into_string().unwrap()).collect()
}

#[test]
fn an_overflow_directory_that_cannot_be_used() {
    let dir = short_dir();
    let with = |cache_dir: &str| {
        let args = ["--cache", "ram+disk", "--disk", "1G", "--nbd", "unix:x.sock", "--cache-dir", cache_dir];
        export(dir.path(), "null:1G", &args)
    };
    with("/nowhere/cache")
        .fails(3, &["cannot open a volume over 'null:1G'", "/nowhere/cache", "No such file"]);
    // No file can be made there, whoever asks.
    let ran = with("/proc");
    // Root finds no such file, and a user may not.
    let code = if ran.code == 3 { 3 } else { 1 };
    ran.fails(code, &["cannot make an overflow file in /proc"]);
    let args = ["--disk", "9000T", "--nbd", "unix:x.sock", "--cache-dir", "/var/tmp"];
    export(dir.path(), "null:1G", &args).fails(2, &["8.7 PiB on disk", "/var/tmp has only", "lower limit"]);
    // What would fit if nothing else were there is no bad usage.
    let size =
        run(std::process::Command::new("df").args(["--output=size", "--block-size=1", "/var/tmp"])).ok();
    let size = size.lines().last().expect("a size").trim();
    let args = ["--disk", size, "--nbd", "unix:x.sock", "--cache-dir", "/var/tmp"];
    export(dir.path(), "null:1G", &args).fails(5, &["/var/tmp has only", "lower limit"]);
    assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
}

/// Only root may make its loop device.
#[test]
fn a_device_that_others_use_or_that_is_too_small_is_no_overflow() {
    let dir = short_dir();
    let image = dir.path().join("ext4");
    let tool = |program: &str, args: &[&str]| run(Command::new(program).args(args)).ok();
    std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
    tool("/sbin/mkfs.ext4", &["-q", "-F", image.to_str().unwrap()]);
    let before = std::fs::read(&image).unwrap();
    let device = tool("/sbin/losetup", &["--find", "--show", image.to_str().unwrap()]);
    let device = device.trim();
    // Where the device is not refused, it ends all the same.
    let args = ["--disk", "32M", "--cache-dir", device, "--fuse", "/missing/disk"];
    let refused = export(dir.path(), "null:1G", &args);
    let after = std::fs::read(&image).unwrap();
    tool("/sbin/wipefs", &["--quiet", "--all", device]);
    let cleared = export(dir.path(), "null:1G", &args);
    let larger = ["--disk", "65M", "--cache-dir", device, "--fuse", "/missing/disk"];
    let larger = export(dir.path(), "null:1G", &larger);
    tool("/sbin/losetup", &["--detach", device]);
    refused.fails(4, &[device, "an ext2, ext3 or ext4 file system", "wipefs"]);
    assert!(before == after, "it was written to");
    cleared.fails(3, &["/missing/disk"]);
    larger.fails(2, &["65.0 MiB on disk", &format!("{device} has only 64.0 MiB: choose another device")]);
}

#[test]
fn a_socket_that_cannot_be() {
    let dir = short_dir();
    let long = format!("/tmp/{}", "x".repeat(120));
    for listening in [["--nbd", &format!("unix:{long}")], ["--vhost-user", &long]] {
        export(dir.path(), "null:1G", &[&["--cache", "ram"], &listening[..]].concat())
            .fails(2, &["107", "choose a shorter one"]);
    }
    std::fs::write(dir.path().join("file"), "precious").unwrap();
    export(dir.path(), "null:1G", &["--cache", "ram", "--nbd", "unix:file"])
        .fails(4, &["not a socket is in the way"]);
    assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), b"precious");
    assert_eq!(names(dir.path()), ["file"]);
}

#[test]
fn a_port_in_use() {
    let dir = short_dir();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let ran = export(dir.path(), "null:1G", &["--cache", "ram", "--nbd", &format!("tcp:{address}")]);
    assert!(ran.code != 0 && ran.err.contains(&address) && ran.err.contains("in use"), "{ran:?}");
}

#[test]
fn what_makes_no_sense_is_2_and_invalid() {
    let dir = short_dir();
    let listening = ["--nbd", "unix:x.sock"];
    let export =
        |source: &'static str, more: &[&'static str]| [&["export", source], more, &listening].concat();
    for (args, words) in [
        (export("null:10X", &[]), "'10X' is not a size"),
        (export("ftp://host/disk", &[]), "headwater cannot read images from ftp://"),
        (export("https://host/", &[]), "no image in it"),
        (export("nbd+unix:///?socket=/nowhere/x", &[]), "image import URI"),
        (export("null:1G", &["--ram", "1M"]), "needs at least"),
        (export("null:1G", &["--disk", "1"]), "needs at least 16.0 MiB of disk"),
        (export("null:1G", &["--disk", "0"]), "needs at least 16.0 MiB of disk"),
        (export("null:1G", &["--cache", "disk", "--disk", "15M"]), "needs at least 16.0 MiB of disk"),
        (export("null:1G", &["--ram", "900T"]), "give a smaller --ram"),
        (
            export("deb@1", &["--chunk-cache", "cc:1M"]),
            "headwater: a chunk cache of 1.0 MiB in cc is too small: the minimum is 64.0 MiB",
        ),
        (export("null:1G", &["--write-through"]), "--write-through is an option of a block device"),
        (export("null:1G", &["--queues", "2"]), "give --attach too"),
        (export("null:1G", &["--cache", "ram", "--persistent", "p"]), "needs a disk"),
        (export("null:1G", &["--persistent", "a/b"]), "'a/b' is not a valid name"),
        (export("null:1G", &["--stats", "/"]), "cannot write the counters to /: it is not a regular file"),
        (
            export("null:1G", &["--cache", "ram", "--disk", "5G"]),
            "--disk was given, but the cache mode 'ram'",
        ),
        (
            export("null:1G", &["--cache", "disk", "--ram", "5G"]),
            "--ram was given, but the cache mode 'disk'",
        ),
        (
            vec!["serve", "--listen", "127.0.0.1:9", "--tls-cert", "x", "--tls-key", "y"],
            "that other hosts can reach",
        ),
        (vec!["serve", "--listen", "127.0.0.1:9", "--token-file", "x"], "give --store-listen too"),
        (vec!["serve", "--repair-from", "/srv/images"], "give --scrub too"),
        (vec!["serve", "--nbd", "tcp:0.0.0.0:10809"], "other hosts or guests"),
        (
            vec!["run", "x.raw", "--cache", "ram", "--disk", "5G"],
            "--disk was given, but the cache mode 'ram'",
        ),
        (vec!["machine", "create", "a", "b", "--cache", "disk", "--ram", "5G"], "--ram was given"),
        (vec!["catalog", "create", "a", "b", "--cache", "ram", "--disk", "5G"], "--disk was given"),
        (
            export("null:1G", &["--tls-certificates", "pki", "--tls-allow", "pc-1=desk-1"]),
            "needs --nbd-export",
        ),
        (vec!["machine", "create", "a", "b", "--user-data", "/dev/zero"], "it has more than 4.0 MiB"),
        (
            vec!["store", "verify", "https://127.0.0.1:1/", "--token", "/dev/zero"],
            "it has more than 64.0 KiB",
        ),
        (vec!["store", "verify", "https://127.0.0.1:1/", "--ca", "/dev/zero"], "it has more than 16.0 MiB"),
        (vec!["store", "token", "name", "--token-file", "/dev/zero"], "it has more than 16.0 MiB"),
        (
            export("null:1G", &["--iscsi", "tcp:127.0.0.1:0", "--chap-file", "/dev/zero"]),
            "it has more than 1.0 MiB",
        ),
        (vec!["serve", "--log", "inof"], "'inof' is not a level"),
        (vec!["serve", "--log", "headwater_service=dbug"], "is not a log filter"),
        (vec!["store", "token", "odd name", "--token-file", "tokens"], "'odd name'"),
        (vec!["image", "import", "-"], "give --name"),
        (vec!["image", "import", ""], "is not a file name"),
    ] {
        let with = |more: &[&str]| {
            let mut command = headwater();
            command.current_dir(dir.path()).args(["--data-dir", "data"]).args(more).args(&args);
            run(&mut command)
        };
        with(&[]).fails(2, &[words]);
        let ran = with(&["--json"]);
        let problem: serde_json::Value = serde_json::from_str(ran.err.trim_end()).expect(&ran.err);
        assert_eq!((ran.code, &problem["kind"]), (2, &"invalid".into()), "{ran:?}");
    }
}

#[test]
fn a_rate_of_nothing_is_no_rate() {
    for args in [&["serve", "--scrub", "0"][..], &["store", "verify", "s", "--rate", "0"][..]] {
        let ran = run(headwater().args(args));
        assert!(ran.code == 2 && ran.err.contains("a rate of 0 would read nothing"), "{ran:?}");
    }
}

#[test]
fn a_disk_of_an_odd_size() {
    let dir = short_dir();
    std::fs::write(dir.path().join("odd.raw"), [1; 1000]).unwrap();
    export(dir.path(), "./odd.raw", &["--cache", "ram", "--nbd", "unix:x.sock"])
        .fails(2, &["odd.raw", "1000 bytes", "not a multiple of 512"]);
    assert_eq!(names(dir.path()), ["odd.raw"]);
}
