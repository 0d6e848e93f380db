//! PDUs that initiators send.

use super::header::{CONTINUE, FINAL};
use super::table::{At, Bit, Bits, IMMEDIATE, pdu};

pdu! {
    /// NOP-Out: a ping, or the answer to one.
    NopOut(false, FINAL) {
        /// For immediate delivery.
        immediate: bool = IMMEDIATE;
        /// Logical unit that a target's ping named.
        lun: [u8; 8] = At(8);
        /// Tag; [`super::RESERVED_TAG`] if no answer is wanted.
        task_tag: u32 = At(16);
        /// The target's tag that is answered, or [`super::RESERVED_TAG`].
        transfer_tag: u32 = At(20);
        /// Command number.
        cmd_sn: u32 = At(24);
        /// The next status number that the initiator expects.
        exp_stat_sn: u32 = At(28);
    }
}

pdu! {
    /// SCSI Command.
    ScsiCommand(false, 0) {
        /// For immediate delivery.
        immediate: bool = IMMEDIATE;
        /// No unsolicited Data-Out follows.
        is_final: bool = Bit(1, FINAL);
        /// Data is expected from the target.
        read: bool = Bit(1, 0x40);
        /// Data goes to the target.
        write: bool = Bit(1, 0x20);
        /// Task attribute: 0 untagged, 1 simple, 2 ordered, 3 head of queue, 4 ACA.
        attribute: u8 = Bits(1, 0, 7);
        /// Logical unit.
        lun: [u8; 8] = At(8);
        /// Tag of the task.
        task_tag: u32 = At(16);
        /// Bytes that the initiator wants to move.
        expected_bytes: u32 = At(20);
        /// Command number.
        cmd_sn: u32 = At(24);
        /// The next status number that the initiator expects.
        exp_stat_sn: u32 = At(28);
        /// The first 16 bytes of the command; longer ones go on in an additional header segment.
        cdb: [u8; 16] = At(32);
    }
}

pdu! {
    /// Task Management Function Request.
    TaskManagementRequest(false, FINAL) {
        /// For immediate delivery.
        immediate: bool = IMMEDIATE;
        /// What to do: 1 abort task, 2 abort task set, 3 clear ACA, 4 clear task set, 5 logical unit reset,
        /// 6 target warm reset, 7 target cold reset, 8 task reassign.
        function: u8 = Bits(1, 0, 0x7f);
        /// Logical unit.
        lun: [u8; 8] = At(8);
        /// Tag of the request.
        task_tag: u32 = At(16);
        /// Tag of the task to abort.
        referenced_tag: u32 = At(20);
        /// Command number.
        cmd_sn: u32 = At(24);
        /// The next status number that the initiator expects.
        exp_stat_sn: u32 = At(28);
        /// Command number of the task to abort.
        referenced_cmd_sn: u32 = At(32);
        /// For task reassign.
        exp_data_sn: u32 = At(36);
    }
}

pdu! {
    /// Login Request. Always for immediate delivery.
    LoginRequest(true, 0) {
        /// The initiator is ready to go to the next stage.
        transit: bool = Bit(1, FINAL);
        /// The text continues in the next request.
        go_on: bool = Bit(1, CONTINUE);
        /// Current stage: 0 security, 1 operational, 3 full feature.
        current_stage: u8 = Bits(1, 2, 3);
        /// Next stage.
        next_stage: u8 = Bits(1, 0, 3);
        /// Highest version.
        version_max: u8 = At(2);
        /// Lowest version.
        version_min: u8 = At(3);
        /// The initiator's part of the session's name.
        isid: [u8; 6] = At(8);
        /// The target's part; 0 for a new session.
        tsih: u16 = At(14);
        /// Tag, the same in the whole login.
        task_tag: u32 = At(16);
        /// Connection number.
        cid: u16 = At(20);
        /// First command number.
        cmd_sn: u32 = At(24);
        /// The next status number that the initiator expects.
        exp_stat_sn: u32 = At(28);
    }
}

pdu! {
    /// Text Request.
    TextRequest(false, 0) {
        /// For immediate delivery.
        immediate: bool = IMMEDIATE;
        /// The initiator has nothing more to send.
        is_final: bool = Bit(1, FINAL);
        /// The text goes on in the next request.
        go_on: bool = Bit(1, CONTINUE);
        /// Logical unit; 0.
        lun: [u8; 8] = At(8);
        /// Tag of the exchange.
        task_tag: u32 = At(16);
        /// The target's tag for an exchange that goes on, or [`super::RESERVED_TAG`].
        transfer_tag: u32 = At(20);
        /// Command number.
        cmd_sn: u32 = At(24);
        /// The next status number that the initiator expects.
        exp_stat_sn: u32 = At(28);
    }
}

pdu! {
    /// SCSI Data-Out.
    DataOut(false, 0) {
        /// The last of its sequence.
        is_final: bool = Bit(1, FINAL);
        /// Logical unit, if a transfer tag is given.
        lun: [u8; 8] = At(8);
        /// Tag of the task.
        task_tag: u32 = At(16);
        /// Tag of the R2T that requested it, or [`super::RESERVED_TAG`] for unsolicited data.
        transfer_tag: u32 = At(20);
        /// The next status number that the initiator expects.
        exp_stat_sn: u32 = At(28);
        /// Number in its sequence.
        data_sn: u32 = At(36);
        /// Offset in the command's data.
        offset: u32 = At(40);
    }
}

pdu! {
    /// Logout Request.
    LogoutRequest(false, FINAL) {
        /// For immediate delivery.
        immediate: bool = IMMEDIATE;
        /// 0 close the session, 1 close a connection, 2 remove a connection for recovery.
        reason: u8 = Bits(1, 0, 0x7f);
        /// Tag of the request.
        task_tag: u32 = At(16);
        /// Connection to close.
        cid: u16 = At(20);
        /// Command number.
        cmd_sn: u32 = At(24);
        /// The next status number that the initiator expects.
        exp_stat_sn: u32 = At(28);
    }
}

pdu! {
    /// SNACK Request: asks the target to send something again. Refused at error recovery level 0.
    SnackRequest(false, FINAL) {
        /// 0 data or R2T, 1 status, 2 data acknowledged, 3 R-data.
        kind: u8 = Bits(1, 0, 0x0f);
        /// Logical unit.
        lun: [u8; 8] = At(8);
        /// Tag of the task.
        task_tag: u32 = At(16);
        /// Target transfer tag or SNACK tag.
        transfer_tag: u32 = At(20);
        /// The next status number that the initiator expects.
        exp_stat_sn: u32 = At(28);
        /// First number wanted.
        begin: u32 = At(40);
        /// How many; 0 for all.
        run: u32 = At(44);
    }
}
