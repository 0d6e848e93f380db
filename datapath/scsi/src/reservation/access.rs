//! The access that each command needs, for the tables of SPC-4 5.12.1 and SBC-3 4.17.

use crate::cdb::Op;

/// The access that a command needs while another initiator holds a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Always allowed.
    Identify,
    /// Allowed with every persistent reservation, but not with a reservation by RESERVE.
    Status,
    /// Allowed with a write exclusive persistent reservation.
    Reading,
    /// Never allowed.
    Changing,
}

impl Op {
    /// The access that the command needs.
    pub(crate) fn access(&self) -> Access {
        match self {
            Op::Inquiry { .. } | Op::ReportLuns { .. } | Op::RequestSense { .. } | Op::Release => {
                Access::Identify
            }
            Op::TestUnitReady
            | Op::ReadCapacity10
            | Op::ReadCapacity16 { .. }
            | Op::Reserve
            | Op::ReserveIn { .. }
            | Op::ReserveOut(_)
            | Op::StartStop { start: true, .. }
            | Op::PreventAllow { prevent: false }
            | Op::ReportOpcodes(_)
            | Op::ReportFunctions { .. } => Access::Status,
            Op::Read { .. }
            | Op::Verify { .. }
            | Op::Prefetch { .. }
            | Op::GetLbaStatus { .. }
            | Op::ReadDefects { .. }
            | Op::CopyStatus { .. }
            | Op::CopyParameters { .. }
            | Op::ModeSense(_) => Access::Reading,
            Op::Write { .. }
            | Op::WriteVerify { .. }
            | Op::OrWrite { .. }
            | Op::CompareAndWrite { .. }
            | Op::WriteSame { .. }
            | Op::Unmap { .. }
            | Op::ExtendedCopy { .. }
            | Op::Synchronize { .. }
            | Op::ModeSelect { .. }
            | Op::SelfTest
            | Op::StartStop { start: false, .. }
            | Op::PreventAllow { prevent: true } => Access::Changing,
        }
    }
}
