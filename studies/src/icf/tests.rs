//! Tests configurations as Iometer writes them, and messages about faults in them.

use super::*;

/// A shortened file of Iometer 1.1: two workers, and a mix of two sizes.
pub(crate) const TWO_WORKERS: &str = "\
Version 1.1.0
'TEST SETUP ====================================================================
'Test Description
\tVDI
'Run Time
'\thours      minutes    seconds
\t0          1          30
'Ramp Up Time (s)
\t5
'Default Disk Workers to Spawn
\tNUMBER_OF_CPUS
'Worker Cycling
'\tstart      step       step type
\t1          1          LINEAR
'Test Type
\tNORMAL
'END test setup
'ACCESS SPECIFICATIONS =========================================================
'Access specification name,default assignment
\tVDI, 4K; mixed,ALL
'size,% of size,% reads,% random,delay,burst,align,reply
\t4096,75,20,80,0,1,0,0
\t65536,25,100,0,0,4,4096,0
'Access specification name,default assignment
\tboot,NONE
'size,% of size,% reads,% random,delay,burst,align,reply
\t8192,100,100,100,0,1,8192,0
'END access specifications
'MANAGER LIST ==================================================================
'Manager ID, manager name
\t1,HOST
'Manager network address
\t127.0.0.1
'Worker
\tWorker 1
'Worker type
\tDISK
'Default target settings for worker
'Number of outstanding IOs,test connection rate,transactions per connection,use fixed seed,fixed seed value
\t16,DISABLED,1,DISABLED,0
'Disk maximum size,starting sector,Data pattern
\t2048000,0,2
'End default target settings for worker
'Assigned access specs
\tboot
\tVDI, 4K; mixed
'End assigned access specs
'Target assignments
'Target
\tD: \"disk\"
'Target type
\tDISK
'End target
'End target assignments
'End worker
'Worker
\tWorker 2
'Worker type
\tDISK
'Disk maximum size,starting sector,Data pattern
\t1024,2048000,2
'Assigned access specs
'End assigned access specs
'End worker
'End manager
'END manager list
Version 1.1.0
";

#[test]
fn a_file_of_iometer_gives_its_workers_and_lines() {
    let read = Configuration::parse(TWO_WORKERS).unwrap();
    assert_eq!((read.run_s, read.ramp_up_s), (90, 5));
    let line = |request_bytes, share_percent, read_percent, random_percent, burst, alignment_bytes| Line {
        request_bytes,
        share_percent,
        alignment_bytes,
        read_percent,
        random_percent,
        burst,
        delay_ms: 0,
    };
    let mixed = read.specification("VDI, 4K; mixed").unwrap();
    assert_eq!(mixed.lines, [line(4096, 75, 20, 80, 1, 512), line(65536, 25, 100, 0, 4, 4096)]);
    let delayed = Configuration::parse(&TWO_WORKERS.replacen("80,0,1,0,0", "80,250,1,0,0", 1)).unwrap();
    assert_eq!(delayed.specifications[0].lines[0].delay_ms, 250);
    let worker = |name: &str, outstanding, start_bytes, size_bytes, names: &[&str]| WorkerPlan {
        name: name.into(),
        outstanding,
        start_bytes,
        size_bytes,
        specifications: names.iter().map(|name| (*name).to_owned()).collect(),
    };
    let mib_1000 = 1000 << 20;
    assert_eq!(
        read.workers,
        [
            worker("Worker 1", 16, 0, mib_1000, &["boot", "VDI, 4K; mixed"]),
            worker("Worker 2", 1, mib_1000, 512 << 10, &["VDI, 4K; mixed"]),
        ]
    );
    assert_eq!(read.end_bytes(), Some(mib_1000 + (512 << 10)));
}

#[test]
fn a_fault_is_reported_with_line_and_column() {
    let cases = [
        ("\t4096,75,20,80", "\t4096,75,x,80", "line 22, column 10: the share of reads is \"x\""),
        ("\t4096,75,20,80", "\t4095,75,20,80", "line 22, column 2: the size must be a multiple"),
        (
            "\t4096,75,20,80",
            "\t4096,70,20,80",
            "line 23, column 1: the shares of the sizes of \"VDI, 4K; mixed\" sum to 95",
        ),
        (
            "80,0,1,0,0",
            "80,3600001,1,0,0",
            "line 22, column 16: the delay is \"3600001\"; it must be a number from 0 to 3600000",
        ),
        ("80,0,1,0,0", "80,0,1", "line 22, column 19: the alignment is missing"),
        ("\tboot\n\tVDI", "\tboost\n\tVDI", "line 45, column 2: there is no access specification \"boost\""),
        (
            "'Worker type\n\tDISK",
            "'Worker type\n\tNETWORK,TCP",
            "line 37, column 2: only DISK workers are supported",
        ),
        (
            "\t0          1          30",
            "\t0 61 3",
            "line 7, column 2: the run time must be hours (0-8784), minutes (0-59) and seconds",
        ),
        ("\tNORMAL", "\tCYCLE_TARGETS", "line 16, column 2: only tests of type NORMAL"),
        (
            "Version 1.1.0\n'TEST",
            "Versoin\n'TEST",
            "line 1, column 1: this is not a configuration of Iometer",
        ),
    ];
    for (good, bad, expected) in cases {
        assert!(TWO_WORKERS.contains(good), "{good}");
        let error = Configuration::parse(&TWO_WORKERS.replacen(good, bad, 1)).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}\n{expected}");
    }
    let empty = Configuration::parse("").unwrap_err();
    assert_eq!((empty.line, empty.column), (1, 1));
    assert!(Configuration::parse("Version 1.1.0\n").unwrap_err().to_string().contains("no worker"));
}
