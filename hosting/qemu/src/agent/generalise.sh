# Removes the identity of a machine from its Linux guest, so that its disk can become a version that many machines
# boot. The guest agent runs it as root: sh -s -- HOST_NAME [PATH..]. Prints each removed item on a line; failures go
# to standard error.
#
# Reset: host keys, machine-id, host name, state of cloud-init and DHCP clients, random seeds, shell histories, logs.
# Executables in the image's /etc/headwater/generalise.d can do more; the daemon adds the PATHs, which may have
# wildcards.
set -u
umask 077
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
failed=0

said() { printf '%s\n' "$1"; }
wrong() {
    printf '%s\n' "$1" >&2
    failed=1
}
has() { command -v "$1" >/dev/null 2>&1; }

# A file system may keep the blocks of a deleted file, and with them its secrets.
overwrite() {
    has shred && find "$@" -xdev -type f -exec shred -n 1 {} + >/dev/null 2>&1
}

drop() {
    for path; do
        # A pattern without matches stays unexpanded.
        [ -e "$path" ] || [ -L "$path" ] || continue
        if rm -rf -- "$path"; then said "$path"; else wrong "cannot remove $path"; fi
    done
}

destroy() {
    for path; do
        [ -e "$path" ] && [ ! -L "$path" ] && overwrite "$path"
        drop "$path"
    done
}

empty() {
    for path; do
        [ -f "$path" ] && [ -s "$path" ] || continue
        if : >"$path"; then said "$path (emptied)"; else wrong "cannot empty $path"; fi
    done
}

run_hooks() {
    for hook in /etc/headwater/generalise.d/*; do
        [ -f "$hook" ] && [ -x "$hook" ] || continue
        if "$hook" >&2; then said "$hook (run)"; else wrong "$hook failed"; fi
    done
}

# Services that would write the removed files again at shutdown. Masked until the next boot.
quieten() {
    [ -d /run/systemd/system ] || return 0
    systemctl --quiet mask --runtime systemd-random-seed.service systemd-update-utmp.service
    systemctl --quiet stop syslog.socket rsyslog.service
    journalctl --relinquish-var
} >/dev/null 2>&1

cloud_init() {
    has cloud-init || return 0
    for path in /var/lib/cloud/instances /var/lib/cloud/data; do
        [ -d "$path" ] && overwrite "$path"
    done
    if cloud-init clean --logs >&2; then
        said "what cloud-init keeps (cloud-init clean --logs)"
    else
        wrong "cloud-init clean --logs failed"
    fi
    # These files name the network card of this machine, and are created again at the next first boot.
    for path in /etc/netplan/50-cloud-init.yaml /etc/network/interfaces.d/50-cloud-init \
        /etc/systemd/network/10-cloud-init-*.network /etc/sysconfig/network-scripts/ifcfg-* \
        /etc/NetworkManager/system-connections/cloud-init-*.nmconnection; do
        [ -f "$path" ] && grep -qi cloud-init "$path" && drop "$path"
    done
}

host_name() {
    short=${host%%.*}
    if [ -f /etc/hostname ]; then
        read -r name </etc/hostname
        case $name in
            "$host" | "$short") printf 'localhost\n' >/etc/hostname && said "/etc/hostname (now localhost)" ;;
        esac
    fi
    [ -f /etc/hosts ] || return 0
    pattern=$(printf '%s' "$short" | sed 's/\./\\./g')
    line="^127\.0\.1\.1[[:space:]]\(.*[[:space:]]\)\{0,1\}$pattern\(\.[^[:space:]]*\)\{0,1\}\([[:space:]].*\)\{0,1\}\$"
    if grep -q "$line" /etc/hosts; then
        rest=$(sed "/$line/d" /etc/hosts)
        printf '%s\n' "$rest" >/etc/hosts && said "127.0.1.1 in /etc/hosts"
    fi
}

logs() {
    drop /var/log/journal/*
    empty /var/log/wtmp /var/log/btmp /var/log/lastlog
    [ -d /var/log ] || return 0
    count=$(find /var/log -xdev -type f -size +0 2>/dev/null | wc -l)
    [ "$count" -gt 0 ] || return 0
    find /var/log -xdev -type f \( -name '*.gz' -o -name '*.xz' -o -name '*.[0-9]' -o -name '*.old' \) -exec rm -f {} +
    find /var/log -xdev -type f -size +0 -exec sh -c 'for path; do : >"$path"; done' sh {} +
    said "/var/log ($((count)) files emptied or removed)"
}

generalise() {
    host=$1
    shift
    run_hooks
    quieten
    cloud_init
    destroy /etc/ssh/ssh_host_* /etc/dropbear/dropbear_*_host_key
    empty /etc/machine-id
    [ -L /var/lib/dbus/machine-id ] || drop /var/lib/dbus/machine-id
    host_name
    destroy /var/lib/headwater/user-data
    drop /var/lib/dhcp/*.leases* /var/lib/dhclient/* /var/lib/dhcpcd/*.lease* /var/lib/NetworkManager/*lease* \
        /var/lib/NetworkManager/timestamps /var/lib/NetworkManager/seen-bssids \
        /etc/udev/rules.d/70-persistent-net.rules
    destroy /var/lib/NetworkManager/secret_key /var/lib/systemd/credential.secret /var/lib/systemd/random-seed \
        /var/lib/urandom/random-seed /var/lib/random-seed /boot/loader/random-seed /boot/efi/loader/random-seed
    for home in /root /home/*; do
        destroy "$home"/.*_history "$home"/.lesshst "$home"/.viminfo "$home"/.wget-hsts
    done
    for pattern; do
        # Wildcards are expanded; spaces are part of a name.
        IFS=
        destroy $pattern
        unset IFS
    done
    logs
    # Blocks become free only after the deletions are written.
    sync
    if has fstrim && fstrim -a >/dev/null 2>&1; then said "blocks of removed files (fstrim)"; fi
    sync
    exit "$failed"
}

generalise "$@" </dev/null
