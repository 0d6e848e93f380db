//! Filters the system calls of the disk process (seccomp). It is a list of denied calls, because libraries may use
//! any others.
//!
//! A denied call fails with EPERM. `clone3` fails with ENOSYS, because a filter cannot see its flags; the C library uses `clone` then.
//! Requests that are submitted through io_uring are not system calls: a filter does not see them, but Landlock does.

use std::collections::BTreeMap;

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter, sock_filter,
};

/// Calls that are always denied.
#[rustfmt::skip]
const DENIED: &[c_long] = &[
    // Other programs and processes.
    libc::SYS_execve, libc::SYS_execveat, libc::SYS_ptrace, libc::SYS_process_vm_readv, libc::SYS_process_vm_writev,
    libc::SYS_process_madvise, libc::SYS_pidfd_getfd, libc::SYS_pidfd_send_signal, libc::SYS_kcmp, libc::SYS_kill,
    libc::SYS_rt_sigqueueinfo, libc::SYS_rt_tgsigqueueinfo,
    // Mounts, namespaces, and files by handle.
    libc::SYS_mount, libc::SYS_umount2, libc::SYS_pivot_root, libc::SYS_chroot, libc::SYS_move_mount, libc::SYS_open_tree,
    libc::SYS_fsopen, libc::SYS_fsconfig, libc::SYS_fsmount, libc::SYS_fspick, libc::SYS_mount_setattr, libc::SYS_setns,
    libc::SYS_unshare, libc::SYS_name_to_handle_at, libc::SYS_open_by_handle_at, libc::SYS_mknodat, libc::SYS_quotactl,
    libc::SYS_swapon, libc::SYS_swapoff, libc::SYS_acct, libc::SYS_fanotify_init, libc::SYS_fanotify_mark,
    // The kernel itself.
    libc::SYS_init_module, libc::SYS_finit_module, libc::SYS_delete_module, libc::SYS_kexec_load, libc::SYS_reboot,
    libc::SYS_bpf, libc::SYS_perf_event_open, libc::SYS_userfaultfd, libc::SYS_syslog, libc::SYS_add_key,
    libc::SYS_request_key, libc::SYS_keyctl, libc::SYS_lookup_dcookie, libc::SYS_vhangup, libc::SYS_personality,
    // Clock, names, users.
    libc::SYS_settimeofday, libc::SYS_clock_settime, libc::SYS_adjtimex, libc::SYS_clock_adjtime, libc::SYS_sethostname,
    libc::SYS_setdomainname, libc::SYS_setuid, libc::SYS_setgid, libc::SYS_setgroups,
];

/// More such calls, on this processor architecture only.
#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
const DENIED_HERE: &[c_long] = &[
    libc::SYS_fork, libc::SYS_vfork, libc::SYS_mknod, libc::SYS_iopl, libc::SYS_ioperm, libc::SYS_modify_ldt,
    libc::SYS_kexec_file_load,
];
#[cfg(not(target_arch = "x86_64"))]
const DENIED_HERE: &[c_long] = &[];

/// On x86-64, a kernel may have each call a second time, with numbers from 2^30 on (x32). All of these fail with
/// ENOSYS.
const NO_SECOND_NUMBERS: [sock_filter; 4] = [
    // The number of the call.
    sock_filter { code: 0x20, jt: 0, jf: 0, k: 0 },
    // Is it 2^30 or more?
    sock_filter { code: 0x35, jt: 0, jf: 1, k: 1 << 30 },
    sock_filter { code: 0x06, jt: 0, jf: 0, k: libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32 },
    sock_filter { code: 0x06, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW },
];

/// Denies the calling thread, and the threads that it starts, the system calls that no disk needs. `false`: there is
/// no filter for this processor.
pub fn deny(network: bool) -> anyhow::Result<bool> {
    let Ok(processor) = TargetArch::try_from(std::env::consts::ARCH) else { return Ok(false) };
    for program in filters(network, processor)? {
        apply_filter(&program)?;
    }
    if processor == TargetArch::x86_64 {
        apply_filter(&NO_SECOND_NUMBERS)?;
    }
    Ok(true)
}

fn filters(network: bool, processor: TargetArch) -> Result<[BpfProgram; 2], seccompiler::BackendError> {
    let mut denied: BTreeMap<i64, Vec<SeccompRule>> =
        DENIED.iter().chain(DENIED_HERE).map(|call| (*call, Vec::new())).collect();
    let is_no_thread = argument(SeccompCmpOp::MaskedEq(flag(libc::CLONE_THREAD)), 0)?;
    denied.insert(libc::SYS_clone, vec![SeccompRule::new(vec![is_no_thread])?]);
    let families: &[_] =
        if network { &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6] } else { &[libc::AF_UNIX] };
    let others = families.iter().map(|family| argument(SeccompCmpOp::Ne, flag(*family)));
    denied.insert(libc::SYS_socket, vec![SeccompRule::new(others.collect::<Result<_, _>>()?)?]);
    if !network {
        // The process could call the daemon otherwise. It needs no connections of its own: machines and daemons
        // connect to it.
        denied.insert(libc::SYS_connect, Vec::new());
    }
    let hidden = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let program = |calls, error: i32| {
        let action = SeccompAction::Errno(error.unsigned_abs());
        SeccompFilter::new(calls, SeccompAction::Allow, action, processor)?.try_into()
    };
    Ok([program(denied, libc::EPERM)?, program(hidden, libc::ENOSYS)?])
}

/// A condition on the first argument of a call.
fn argument(is: SeccompCmpOp, value: u64) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(0, SeccompCmpArgLen::Dword, is, value)
}

fn flag(value: i32) -> u64 {
    u64::from(value.unsigned_abs())
}
