//! What `export --record` and recorded machines write: which requests were sent, and nothing of what they carried.

use std::io::BufRead;
use std::path::Path;
use std::process::Stdio;

use crate::support::{self, Daemon, headwater, run, short_dir, signal};
use headwater_block::blocking;
use headwater_nbd::Client;
use headwater_recorder::{Content, Kind, Reader, Record};

fn records(path: &Path) -> (Vec<u64>, Vec<Record>) {
    let mut reader = Reader::open(path).unwrap();
    let records = std::iter::from_fn(|| reader.next_record().unwrap()).collect();
    (reader.volumes_bytes().to_vec(), records)
}

#[test]
fn an_export_records_the_requests_of_each_machine() {
    let dir = short_dir();
    let (base, file) = (dir.path().join("base.raw"), dir.path().join("two.rec"));
    let mut image = vec![0; 16 << 20];
    image[..4096].fill(9);
    std::fs::write(&base, &image).unwrap();
    let mut export = headwater()
        .arg("export")
        .arg(&base)
        .args([
            "--format",
            "raw",
            "--cache",
            "ram",
            "--ram",
            "16M",
            "--nbd-export",
            "one",
            "--nbd-export",
            "two",
        ])
        .arg(format!("--nbd=unix:{}", dir.path().join("nbd").display()))
        .arg("--record")
        .arg(&file)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let _watchdog = support::Watchdog::on(export.id());
    let mut lines = std::io::BufReader::new(export.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().starts_with("nbd"));
    let open = |name: &str| {
        Client::open(&format!("nbd+unix:///{name}?socket={}", dir.path().join("nbd").display())).unwrap()
    };
    let (one, two) = (open("one"), open("two"));
    blocking::write(&*two, 8192, &[7; 8192]).unwrap();
    blocking::write(&*one, 0, &[9; 4096]).unwrap();
    blocking::write_zeroes(&*two, 8192, 4096).unwrap();
    let mut secret = [0; 4096];
    blocking::read(&*two, 12_288, &mut secret).unwrap();
    assert_eq!(secret, [7; 4096]);
    drop((one, two));
    signal(export.id(), "TERM");
    assert!(export.wait().unwrap().success());
    let (sizes, records) = records(&file);
    assert_eq!(sizes, [16 << 20; 2]);
    assert!(matches!(records.last(), Some(Record::End { .. })));
    let requests = records.iter().filter_map(|record| match record {
        Record::Request(it) if it.kind != Kind::Flush => {
            Some((it.volume, it.kind, it.offset, it.bytes, it.content))
        }
        _ => None,
    });
    let expected = [
        (1, Kind::Write, 8192, 8192, Content::Packs(1)),
        // A file is not compared: that would be a read.
        (0, Kind::Write, 0, 4096, Content::Packs(1)),
        (1, Kind::WriteZeroes, 8192, 4096, Content::Unknown),
        (1, Kind::Read, 12_288, 4096, Content::Unknown),
    ];
    assert_eq!(requests.collect::<Vec<_>>(), expected);

    // A file that is there may be another recording.
    let before = std::fs::read(&file).unwrap();
    let again = run(headwater()
        .args(["export", "null:16M", "--nbd", &format!("unix:{}", dir.path().join("nbd2").display())])
        .arg("--record")
        .arg(&file));
    again.fails(4, &["cannot record requests in", "two.rec", "File exists", "name a new file"]);
    assert_eq!(std::fs::read(&file).unwrap(), before);
}

#[test]
fn a_machine_is_recorded_from_its_start_to_its_stop() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    daemon.cli(&["machine", "start", "lab", "--record", "--wait"]).ok();
    for _ in 0..3 {
        daemon.console("lab", "w", Some("W"));
    }
    daemon
        .cli(&["machine", "start", "lab", "--record"])
        .fails(4, &["it is on", "a recording begins when a machine starts", "headwater machine stop lab"]);
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    let file = daemon.path().join("recordings/lab-1.rec");
    let (sizes, first) = records(&file);
    assert_eq!(sizes.len(), 1);
    assert!(matches!(first.last(), Some(Record::End { .. })), "{first:?}");
    let count = |kind| {
        let is_kind = |record: &&Record| matches!(record, Record::Request(it) if it.kind == kind);
        first.iter().filter(is_kind).count()
    };
    assert_eq!((count(Kind::Write), count(Kind::Read) > 0), (3, true), "{first:?}");

    // The next start is not recorded unless it is told to be, and then in another file.
    let files = || std::fs::read_dir(daemon.path().join("recordings")).unwrap().count();
    daemon.cli(&["machine", "start", "lab"]).ok();
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    assert_eq!(files(), 1);
    daemon.cli(&["machine", "start", "lab", "--record"]).ok();
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    assert!(files() == 2 && daemon.path().join("recordings/lab-2.rec").exists());
}
