//! Other programs as initiators: libiscsi's tools and QEMU's iSCSI driver.

use std::process::Command;

use crate::fixture::{Fixture, TARGET, accounts};
use headwater_iscsi::Limits;
use headwater_testkit::{ReferenceDisk, Rng, output, run};

const MIB: u64 = 1 << 20;

#[test]
fn libiscsi_discovers_the_target_and_inquires_it() {
    let fixture = Fixture::new(ReferenceDisk::new(8 * MIB));
    let portal = format!("iscsi://127.0.0.1:{}", fixture.server.port());
    let list = run("libiscsi-bin", "iscsi-ls", &["--show-luns", &portal]);
    assert!(list.contains(TARGET), "{list}");
    assert!(list.contains("Lun:0"), "{list}");
    let inquiry = run("libiscsi-bin", "iscsi-inq", &[&fixture.url()]);
    assert!(inquiry.contains("HEADWATR"), "{inquiry}");
    let capacity = run("libiscsi-bin", "iscsi-readcapacity16", &[&fixture.url()]);
    assert!(capacity.contains("8388608"), "{capacity}");
}

#[test]
fn qemu_img_writes_and_reads_a_disk() {
    let fixture = Fixture::new(ReferenceDisk::new(16 * MIB));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk.raw");
    let contents = Rng::new(11).bytes((16 * MIB) as usize);
    std::fs::write(&file, &contents).unwrap();
    let (file, url) = (file.to_str().unwrap(), fixture.url());
    run("qemu-utils qemu-block-extra", "qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", file, &url]);
    assert_eq!(fixture.disk.contents(), contents);
    run("qemu-utils qemu-block-extra", "qemu-img", &["compare", "-f", "raw", "-F", "raw", file, &url]);
    // Many requests at once, with a pattern that is read back.
    run(
        "qemu-utils",
        "qemu-img",
        &["bench", "-f", "raw", "-w", "-c", "2000", "-d", "32", "-s", "4096", &url],
    );
    let script = [
        "-f",
        "raw",
        &url,
        "-c",
        "aio_write -P 7 1M 3M",
        "-c",
        "aio_write -P 9 8M 64k",
        "-c",
        "aio_flush",
        "-c",
        "read -P 7 1M 3M",
        "-c",
        "read -P 9 8M 64k",
        "-c",
        "discard 1M 1M",
        "-c",
        "read -P 0 1M 1M",
        "-c",
        "flush",
    ];
    let text = run("qemu-utils qemu-block-extra", "qemu-io", &script);
    assert!(!text.contains("Pattern verification failed"), "{text}");
}

#[test]
fn qemu_writes_and_reads_with_each_choice_of_header_digests() {
    let fixture = Fixture::new(ReferenceDisk::new(16 * MIB));
    let port = fixture.server.port();
    // QEMU's driver supports no data digests. Each digest option writes different bytes.
    for (choice, pattern) in [("crc32c", "21"), ("none", "22"), ("crc32c-none", "23"), ("none-crc32c", "24")]
    {
        let image = format!(
            "driver=iscsi,transport=tcp,portal=127.0.0.1:{port},target={TARGET},lun=0,header-digest={choice}"
        );
        // A part of a segment, whole segments, and data that R2Ts request.
        let pieces = ["0 512", "64k 128k", "1M 5M"];
        let mut script = vec!["--image-opts".to_owned(), image];
        for (command, piece) in pieces.iter().map(|p| ("write", p)).chain(pieces.iter().map(|p| ("read", p)))
        {
            script.extend(["-c".to_owned(), format!("{command} -P {pattern} {piece}")]);
        }
        let script: Vec<&str> = script.iter().map(String::as_str).collect();
        let text = run("qemu-utils qemu-block-extra", "qemu-io", &script);
        assert!(!text.contains("verification failed"), "{choice}: {text}");
        let contents = fixture.disk.contents();
        let pattern: u8 = pattern.parse().unwrap();
        for range in [0..512, 64 << 10..192 << 10, 1 << 20..6 << 20] {
            assert!(contents[range].iter().all(|byte| *byte == pattern), "{choice}: other bytes are stored");
        }
    }
}

#[test]
fn libiscsi_and_qemu_log_in_with_chap_and_only_with_the_right_secret() {
    let fixture = Fixture::with(ReferenceDisk::new(MIB), Limits::default(), Some(accounts()));
    let port = fixture.server.port();
    let url = |user: &str, secret: &str| format!("iscsi://{user}%{secret}@127.0.0.1:{port}/{TARGET}/0");
    run("libiscsi-bin", "iscsi-inq", &[&url("alice", "alice-secret-1")]);
    run("libiscsi-bin", "iscsi-inq", &[&url("bob", "bob-secret-two")]);
    let mutual =
        format!("{}?target_user=disk&target_password=disk-secret-three", url("alice", "alice-secret-1"));
    run("libiscsi-bin", "iscsi-inq", &[&mutual]);
    run("qemu-utils qemu-block-extra", "qemu-img", &["info", "-f", "raw", &url("alice", "alice-secret-1")]);
    for bad in [
        url("alice", "bob-secret-two"),
        url("carol", "alice-secret-1"),
        format!("iscsi://127.0.0.1:{port}/{TARGET}/0"),
        format!("{}?target_user=disk&target_password=not-the-secret", url("alice", "alice-secret-1")),
    ] {
        let refused = output("libiscsi-bin", Command::new("iscsi-inq").arg(&bad));
        let text = String::from_utf8_lossy(&refused.stdout) + String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success(), "{bad}: {text}");
    }
}
