//! One initiator's session with a unit on a reference disk, for all tests.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use headwater_scsi::{
    Attribute, Cdb, Command, Identity, Initiator, LogicalUnit, Lun, Nexus, Now, Options, Outcome, Status,
    Target, Task,
};
use headwater_testkit::{ReferenceDisk, ReferenceOptions};

/// How long a test waits for an event that must happen.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub fn identity() -> Identity {
    Identity {
        vendor: "HEADWATR".into(),
        product: "Volume".into(),
        revision: "0001".into(),
        serial: "serial-7".into(),
        uuid: *b"\xabcdefghijklmnopq",
    }
}

pub fn initiator(name: &str) -> Initiator {
    let mut transport_id = vec![0x45, 0, 0, 0];
    transport_id.extend_from_slice(name.as_bytes());
    transport_id.resize(transport_id.len().next_multiple_of(4), 0);
    Initiator {
        transport_id: transport_id.into_boxed_slice(),
        target_port: 1,
        target_port_name: "naa.target,t,0x0001".into(),
    }
}

/// A target with one unit, without the unit attention of power on.
pub fn target_with(disk: ReferenceDisk, options: Options) -> Arc<Target> {
    target_on(&Arc::new(disk), options)
}

/// The same on a disk that the test can access.
pub fn target_on(disk: &Arc<ReferenceDisk>, options: Options) -> Arc<Target> {
    let options = Options { power_on_attention: false, ..options };
    let unit = LogicalUnit::new(Arc::clone(disk) as Arc<dyn headwater_block::Device>, identity(), options);
    Target::new("naa.target", vec![(0, unit)])
}

pub fn target(blocks: u64, reference: ReferenceOptions) -> Arc<Target> {
    let size_bytes = blocks * u64::from(reference.logical_block_bytes);
    target_with(ReferenceDisk::with_options(size_bytes, reference), Options::default())
}

/// The answer to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: Status,
    /// Sense key and code; `(0, 0)` without.
    pub sense: (u8, u16),
    pub data: Vec<u8>,
}

impl Answer {
    pub fn good(data: Vec<u8>) -> Self {
        Self { status: Status::Good, sense: (0, 0), data }
    }

    pub fn check(key: u8, code: u16) -> Self {
        Self { status: Status::CheckCondition, sense: (key, code), data: Vec::new() }
    }

    pub fn conflict() -> Self {
        Self { status: Status::ReservationConflict, sense: (0, 0), data: Vec::new() }
    }

    fn new(reply: &headwater_scsi::Reply, data: Vec<u8>) -> Self {
        let sense = reply.sense.map_or((0, 0), |sense| (sense.key(), sense.code().0));
        assert_eq!(reply.sense.is_some(), reply.status == Status::CheckCondition);
        Self { status: reply.status, sense, data }
    }
}

pub const LUN: Lun = Lun([0; 8]);

/// Sends a command with `room` bytes for data-in, and makes it a task if it must wait.
pub fn send_with(nexus: &Nexus, lun: Lun, cdb: &[u8], data_out: &[u8], room: usize) -> Answer {
    let cdb = Cdb::new(cdb);
    let announced_bytes = data_out.len() as u64;
    let mut data_in = vec![0xee; room];
    let command = Command { lun, attribute: Attribute::Simple, cdb: &cdb, data_out, announced_bytes };
    match nexus.try_now(&command, &mut data_in) {
        Now::Done { reply, data_in_bytes } => {
            assert!(data_in[data_in_bytes..].iter().all(|b| *b == 0xee) || reply.status != Status::Good);
            data_in.truncate(data_in_bytes);
            Answer::new(&reply, data_in)
        }
        Now::MustWait => {
            let outcome = wait(&start(nexus, lun, &cdb, data_out, 7));
            Answer::new(&outcome.reply.expect("nobody aborted it"), outcome.data_in)
        }
    }
}

pub fn send(nexus: &Nexus, cdb: &[u8], data_out: &[u8]) -> Answer {
    send_with(nexus, LUN, cdb, data_out, 8192)
}

/// Starts a task.
pub fn start(nexus: &Nexus, lun: Lun, cdb: &Cdb, data_out: &[u8], tag: u64) -> mpsc::Receiver<Outcome> {
    start_as(nexus, lun, cdb, data_out, tag, Attribute::Simple)
}

pub fn start_as(
    nexus: &Nexus,
    lun: Lun,
    cdb: &Cdb,
    data_out: &[u8],
    tag: u64,
    attribute: Attribute,
) -> mpsc::Receiver<Outcome> {
    let (sender, receiver) = mpsc::channel();
    let task = Task {
        lun,
        attribute,
        tag,
        arrival: nexus.arrival(lun),
        cdb: *cdb,
        data_out: data_out.to_vec(),
        announced_bytes: data_out.len() as u64,
        data_in: Vec::new(),
    };
    nexus.execute(task, move |outcome| drop(sender.send(outcome)));
    receiver
}

pub fn wait(receiver: &mpsc::Receiver<Outcome>) -> Outcome {
    receiver.recv_timeout(PATIENCE).expect("the task was never answered")
}

pub fn read10(lba: u32, blocks: u16) -> [u8; 10] {
    ten(0x28, 0, lba, blocks)
}

pub fn write10(lba: u32, blocks: u16) -> [u8; 10] {
    ten(0x2a, 0, lba, blocks)
}

pub fn ten(opcode: u8, flags: u8, lba: u32, blocks: u16) -> [u8; 10] {
    let [a, b, c, d] = lba.to_be_bytes();
    let [e, f] = blocks.to_be_bytes();
    [opcode, flags, a, b, c, d, 0, e, f, 0]
}

pub fn sixteen(opcode: u8, flags: u8, lba: u64, blocks: u32) -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[0] = opcode;
    cdb[1] = flags;
    cdb[2..10].copy_from_slice(&lba.to_be_bytes());
    cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
    cdb
}
