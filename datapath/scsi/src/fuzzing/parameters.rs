//! Commands with data-out from several initiators, one after the other, compared with a model of the unit:
//! its bytes, modes and reservations, and the unit attentions of each initiator.
//!
//! The model parses each parameter list by the tables of SPC-4 and SBC-3, and predicts the answer to the last
//! bit of its sense data. After each command the unit's state equals the model's.

use std::sync::{Arc, Mutex, PoisonError};

use headwater_block::Geometry;
use headwater_block::fuzzing::{Input, PlainDisk};

use super::decoded;
use super::model::{BLOCK, BLOCKS, Model, NEXUSES, TRANSFER_BLOCKS, Verdict};
use crate::cdb::{Op, cdb_bytes};
use crate::identity::{Identity, Initiator};
use crate::sense::{Code, Fault, Status};
use crate::target::{Nexus, Target};
use crate::task::{Attribute, Cdb, Command, Function, Lun, Now, Reply, Task};
use crate::unit::{LogicalUnit, Options};

const LUN: Lun = Lun([0; 8]);
/// Operation codes that no command has. In an input they mean: the session ends and a new one begins; the
/// unit is reset.
const ANOTHER_SESSION: u8 = 0xfe;
const RESET: u8 = 0xff;
/// Most commands of one input.
const COMMANDS: usize = 200;

fn identity() -> Identity {
    Identity {
        vendor: "HEADWATR".into(),
        product: "Volume".into(),
        revision: "0001".into(),
        serial: "serial-7".into(),
        uuid: *b"\xabcdefghijklmnopq",
    }
}

fn transport_id(who: usize) -> Vec<u8> {
    vec![0x45, 0, 0, 4, u8::try_from(who).unwrap_or(0), 0, 0, 0]
}

fn initiator(who: usize) -> Initiator {
    Initiator {
        transport_id: transport_id(who).into_boxed_slice(),
        target_port: 1,
        target_port_name: "naa.target,t,0x0001".into(),
    }
}

struct Bench {
    disk: Arc<PlainDisk>,
    unit: Arc<LogicalUnit>,
    target: Arc<Target>,
    nexuses: Vec<Nexus>,
    model: Model,
}

impl Bench {
    fn new() -> Self {
        let geometry = Geometry {
            size_bytes: BLOCKS * BLOCK,
            logical_block_bytes: 512,
            physical_block_bytes: 512,
            read_only: false,
            volatile_cache: true,
        };
        let contents: Vec<u8> = (0..251).cycle().take(usize::try_from(BLOCKS * BLOCK).unwrap_or(0)).collect();
        let disk = Arc::new(PlainDisk::new(geometry, contents.clone()));
        let transfer_bytes = u32::try_from(TRANSFER_BLOCKS * BLOCK).unwrap_or(0);
        let options = Options { power_on_attention: false, transfer_bytes, ..Options::default() };
        let unit = LogicalUnit::new(disk.clone(), identity(), options);
        let target = Target::new("naa.target", vec![(0, Arc::clone(&unit))]);
        let nexuses = (0..NEXUSES).map(|who| target.nexus(initiator(who))).collect();
        let designators = crate::inquiry::designators(&unit).map(|own| (own.kind, own.bytes)).to_vec();
        Self { disk, unit, target, nexuses, model: Model::new(contents, designators) }
    }

    /// One command: a byte with the sender and the kind of data; the CDB; the data.
    fn step(&mut self, input: &mut Input<'_>) {
        let head = input.byte();
        let who = usize::from(head & 3) % NEXUSES;
        let code = match input.byte() {
            // With more than 0 bytes it would show which of several attentions comes first, which the model
            // does not define.
            0x03 => 0,
            code => code,
        };
        match code {
            ANOTHER_SESSION => {
                self.nexuses[who] = self.target.nexus(initiator(who));
                self.model.ends(who);
                return;
            }
            RESET => {
                self.nexuses[who].manage(Function::LogicalUnitReset { lun: LUN }, |_| {});
                self.model.reset();
                return;
            }
            _ => {}
        }
        let mut cdb = [0; 16];
        cdb[0] = code;
        let rest = cdb_bytes(code).unwrap_or(16) - 1;
        cdb[1..].iter_mut().zip(input.some(rest)).for_each(|(to, from)| *to = *from);
        let cdb = Cdb::from(cdb);
        let wanted = self.nexuses[who].expected(LUN, &cdb).data_out_bytes;
        let (data, announced) = self.data(&cdb, usize::try_from(wanted).unwrap_or(0), head >> 2 & 3, input);
        let attribute = [Attribute::Simple, Attribute::Ordered, Attribute::HeadOfQueue, Attribute::Aca]
            [usize::from(head >> 4 & 3)];

        let verdict = self.model.run(who, *cdb.bytes(), &data, announced);
        let (reply, data_in) = self.send(who, &cdb, attribute, &data, announced);
        self.check(who, &cdb, &verdict, &reply, &data_in);
    }

    /// The data-out, and the length that the initiator announced.
    fn data(&self, cdb: &Cdb, wanted: usize, kind: u8, input: &mut Input<'_>) -> (Vec<u8>, u64) {
        let mut announced = wanted;
        let mut data;
        match kind {
            // From the input; a parameter list.
            0 => data = input.some(wanted).to_vec(),
            // The same byte everywhere.
            1 => data = vec![input.byte(); wanted],
            // The present content, so that comparisons succeed, followed by other bytes.
            2 => {
                let fill = input.byte();
                data = match decoded(*cdb.bytes()) {
                    Ok(
                        Op::CompareAndWrite { span, .. }
                        | Op::Verify { span, .. }
                        | Op::Write { span, .. }
                        | Op::OrWrite { span, .. },
                    ) => self.model.at(span).unwrap_or_default().to_vec(),
                    _ => Vec::new(),
                };
                data.resize(data.len().max(wanted), fill);
            }
            // More or fewer bytes than the command takes.
            _ => {
                announced = usize::from(u16::from_be_bytes(input.array()));
                data = vec![input.byte(); announced];
            }
        }
        data.resize(wanted.min(announced), 0);
        (data, u64::try_from(announced).unwrap_or(u64::MAX))
    }

    fn send(
        &self,
        who: usize,
        cdb: &Cdb,
        attribute: Attribute,
        data_out: &[u8],
        announced_bytes: u64,
    ) -> (Reply, Vec<u8>) {
        let nexus = &self.nexuses[who];
        let mut room = vec![0; 8192];
        let command = Command { lun: LUN, attribute, cdb, data_out, announced_bytes };
        if let Now::Done { reply, data_in_bytes } = nexus.try_now(&command, &mut room) {
            room.truncate(data_in_bytes);
            return (reply, room);
        }
        let task = Task {
            lun: LUN,
            attribute,
            tag: 1,
            arrival: nexus.arrival(LUN),
            cdb: *cdb,
            data_out: data_out.to_vec(),
            announced_bytes,
            data_in: Vec::new(),
        };
        let ended = Arc::new(Mutex::new(None));
        let place = Arc::clone(&ended);
        nexus.execute(task, move |outcome| {
            let before = place.lock().unwrap_or_else(PoisonError::into_inner).replace(outcome);
            assert!(before.is_none(), "a task was answered twice");
        });
        let outcome = ended.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(outcome) = outcome else { panic!("{cdb:?} was not answered by a disk that never waits") };
        let Some(reply) = outcome.reply else { panic!("{cdb:?} was aborted without an abort") };
        (reply, outcome.data_in)
    }

    fn check(&mut self, who: usize, cdb: &Cdb, verdict: &Verdict, reply: &Reply, data_in: &[u8]) {
        let refused = |fault: &Fault| {
            let sense = Some(fault.sense(self.model.modes.descriptor_sense));
            Reply { status: Status::CheckCondition, sense }
        };
        match verdict {
            Verdict::Data(expected) => {
                assert_eq!(*reply, Reply::GOOD, "{cdb:?}");
                assert!(data_in == expected, "{cdb:?}: other data");
            }
            Verdict::Good => assert_eq!((reply, data_in.len()), (&Reply::GOOD, 0), "{cdb:?}"),
            Verdict::Conflict => {
                let conflict = Reply { status: Status::ReservationConflict, sense: None };
                assert_eq!(*reply, conflict, "{cdb:?}");
            }
            Verdict::Refused(fault) => {
                assert_eq!(*reply, refused(fault), "{cdb:?}");
                let bytes = |reply: &Reply| reply.sense.map(|sense| sense.bytes().to_vec());
                assert_eq!(bytes(reply), bytes(&refused(fault)), "{cdb:?}");
            }
            Verdict::Attention => {
                let code = reply.sense.map_or(Code::NONE, |sense| sense.code());
                assert_eq!(*reply, refused(&Fault::unit_attention(code)), "{cdb:?}");
                self.model.take_attention(who, code);
            }
            // Information about the unit itself, which other tests check.
            Verdict::About => {}
        }
    }

    /// Checks that the unit equals the model.
    fn compare(&mut self) {
        assert_eq!(self.unit.mode.values(), self.model.modes);
        for action in [0, 1, 3] {
            let report = self.unit.reservations.report(action);
            assert_eq!(report, Ok(self.model.registrations.report(action, transport_id)));
        }
        for link in self.unit.links() {
            let who = (0..NEXUSES).find(|who| *link.initiator == initiator(*who));
            let has_attention = who.is_some_and(|who| self.model.has_attention(who));
            assert_eq!(link.attention.is_pending(), has_attention, "initiator {who:?}");
        }
    }
}

/// Executes the commands of an input, one after the other.
pub fn scsi_parameters(bytes: &[u8]) {
    let mut bench = Bench::new();
    let mut input = Input::new(bytes);
    for _ in 0..COMMANDS {
        if input.is_empty() {
            break;
        }
        bench.step(&mut input);
        bench.compare();
    }
    assert!(bench.disk.contents() == bench.model.bytes, "the disk holds other bytes than the model");
}

/// A command of an initiator, with data-out of this kind made from these bytes.
fn command(who: u8, kind: u8, cdb: &[u8], data: &[u8]) -> Vec<u8> {
    [&[who | kind << 2], cdb, data].concat()
}

/// The kind of data, in the first byte of a command.
const LIST: u8 = 0;
const SAME: u8 = 1;
const THERE: u8 = 2;
const OTHER: u8 = 3;

/// A CDB of 16 bytes, at block 7.
fn long(code: u8, flags: u8, blocks: u8, third: u8) -> [u8; 16] {
    [code, flags, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, blocks, third, 0]
}

/// Mode lists, and their effect on writes.
fn modes() -> Vec<u8> {
    let modes = [
        // Caching without WCE, control with D_SENSE; then WCE again and SWP, in a long list with a long
        // descriptor.
        command(0, LIST, &[0x15, 0x10, 0, 0, 36, 0], &{
            let mut list = [0; 36];
            list[4..6].copy_from_slice(&[0x08, 0x12]);
            list[24..36].copy_from_slice(&[0x0a, 0x0a, 0x04, 0x10, 0, 0, 0, 0, 0xff, 0xff, 0, 0]);
            list
        }),
        command(1, SAME, &[0x2a, 0, 0, 0, 0, 5, 0, 0, 2, 0], &[7]),
        command(1, SAME, &[0x2a, 0, 0, 0, 0, 5, 0, 0, 2, 0], &[7]),
        command(0, LIST, &[0x55, 0x10, 0, 0, 0, 0, 0, 0, 36, 0], &{
            let mut list = [0; 36];
            list[4..8].copy_from_slice(&[1, 0, 0, 16]);
            list[8..24].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 2, 0]);
            list[24..36].copy_from_slice(&[0x0a, 0x0a, 0, 0x10, 0x08, 0, 0, 0, 0xff, 0xff, 0, 0]);
            list
        }),
        command(2, SAME, &[0x41, 0, 0, 0, 0, 5, 0, 0, 2, 0], &[7]),
        command(0, LIST, &[0x15, 0x10, 0, 0, 16, 0], &[0, 0, 0, 0, 0x1c, 0x0a, 8, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
        vec![0, RESET],
    ];
    modes.concat()
}

/// Reservations that allow or forbid writes, and preemption.
fn reservations() -> Vec<u8> {
    let reserve = |who: u8, action: u8, kind: u8, key: u8, other: u8| {
        let mut list = [0; 24];
        (list[7], list[15]) = (key, other);
        command(who, LIST, &[0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], &list)
    };
    let write = |who: u8| command(who, SAME, &[0x2a, 0, 0, 0, 0, 1, 0, 0, 1, 0], &[9]);
    let reservations = [
        reserve(0, 0, 0, 0, 1),
        reserve(1, 6, 0, 9, 2),
        reserve(0, 1, 5, 1, 0),
        write(1),
        write(2),
        reserve(1, 4, 7, 2, 1),
        write(0),
        write(0),
        reserve(2, 0, 0, 0, 2),
        reserve(2, 5, 3, 2, 0),
        reserve(2, 2, 3, 2, 0),
        reserve(2, 3, 0, 2, 0),
        command(1, LIST, &[0x16, 0, 0, 0, 0, 0], &[]),
        write(0),
        vec![1, ANOTHER_SESSION],
        write(0),
    ];
    reservations.concat()
}

/// Comparing, clearing, and data of other lengths.
fn medium() -> Vec<u8> {
    let unmap = [
        &[0, 38, 0, 32, 0, 0, 0, 0][..],
        &[0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 9, 0, 0, 0, 0],
        &[0, 0, 0, 0, 0, 0, 0, 60, 0, 0, 0, 4, 0, 0, 0, 0],
    ];
    let medium = [
        command(0, THERE, &long(0x89, 0, 2, 0), &[5]),
        command(0, THERE, &long(0x89, 0, 2, 0), &[5]),
        command(0, SAME, &long(0x89, 0, 2, 0), &[5]),
        command(0, OTHER, &long(0x89, 0, 2, 0), &[2, 0, 5]),
        command(1, LIST, &[0x42, 0, 0, 0, 0, 0, 0, 0, 40, 0], &unmap.concat()),
        command(1, SAME, &long(0x93, 0, 0, 0), &[6]),
        command(1, SAME, &long(0x93, 9, 4, 0), &[]),
        command(1, OTHER, &[0x41, 8, 0, 0, 0, 1, 0, 0, 3, 0], &[2, 0, 1]),
        command(0, SAME, &long(0x8b, 8, 3, 0), &[0xf0]),
        command(0, OTHER, &[0x2e, 2, 0, 0, 0, 1, 0, 0, 3, 0], &[5, 0, 1]),
        command(0, THERE, &[0x2f, 2, 0, 0, 0, 1, 0, 0, 3, 0], &[1]),
        command(0, SAME, &[0x2f, 6, 0, 0, 0, 9, 0, 0, 3, 0], &[6]),
        command(2, LIST, &[0x28, 0, 0, 0, 0, 1, 0, 0, 16, 0], &[]),
    ];
    medium.concat()
}

/// A list of segments to copy.
fn copy() -> Vec<u8> {
    let mut target = [0; 32];
    target[..8].copy_from_slice(&[0xe4, 0, 0, 0, 1, 3, 0, 8]);
    let mut naa = *b"\xabcdefghi";
    naa = [0x30 | naa[0] & 0x0f, naa[1], naa[2], naa[3], naa[4], naa[5], naa[6], naa[7]];
    target[8..16].copy_from_slice(&naa);
    let segment = |from: u8, to: u8, blocks: u8| {
        [2, 0, 0, 24, 0, 0, 0, 0, 0, 0, 0, blocks, 0, 0, 0, 0, 0, 0, 0, from, 0, 0, 0, 0, 0, 0, 0, to]
    };
    let list = [
        &[3, 0, 0, 32, 0, 0, 0, 0, 0, 0, 0, 56, 0, 0, 0, 0][..],
        &target,
        &segment(1, 3, 9),
        &segment(60, 0, 4),
    ]
    .concat();
    command(0, LIST, &long(0x83, 0, 104, 0), &list)
}

/// Seed inputs.
pub(super) fn samples() -> Vec<Vec<u8>> {
    vec![modes(), reservations(), medium(), copy()]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Commands that are mostly valid, so that most of them pass the checks.
    #[test]
    fn random_commands_are_answered_as_the_model_says() {
        let samples = samples();
        let mut rng = headwater_testkit::Rng::new(1);
        for _ in 0..400 {
            let mut bytes = Vec::new();
            while bytes.len() < 1500 {
                let mut part = samples[rng.index(samples.len())].clone();
                for _ in 0..rng.below(6) {
                    let at = rng.index(part.len());
                    part[at] = if rng.chance(1, 2) { rng.below(4) as u8 } else { rng.below(256) as u8 };
                }
                bytes.extend(part);
            }
            scsi_parameters(&bytes);
        }
    }

    /// The samples reach both outcomes: changes and refusals.
    #[test]
    fn samples_change_the_unit_and_are_refused_both() {
        for sample in samples() {
            let mut bench = Bench::new();
            let mut input = Input::new(&sample);
            let before = (bench.model.bytes.clone(), bench.model.registrations.report(0, transport_id));
            while !input.is_empty() {
                bench.step(&mut input);
                bench.compare();
            }
            let after = (bench.model.bytes.clone(), bench.model.registrations.report(0, transport_id));
            assert!(before != after);
        }
    }
}
