# Puts a page file and the system's temporary files on the machine's scratch disk: the disk with the serial number
# 'headwater-scratch'. No other disk is used. A scheduled task of SYSTEM runs it at each start, see docs/windows.md.
#
# If there is no such disk, or several, or it is not empty, nothing is changed. Then the reason is an error of the
# source 'headwater-scratch' in the event log Application, and the exit code is 1.

#Requires -RunAsAdministrator
param([char] $DriveLetter = 'S', [int] $PageFilePercent = 50)
$ErrorActionPreference = 'Stop'
$serial = 'headwater-scratch'
$source = 'headwater-scratch'

function Write-Outcome([string] $type, [string] $message) {
    if (-not [System.Diagnostics.EventLog]::SourceExists($source)) {
        New-EventLog -LogName Application -Source $source
    }
    Write-EventLog -LogName Application -Source $source -EventId 1 -EntryType $type -Message $message
    Write-Output $message
}

# Windows creates a page file at run time only through this call. The usual settings would take effect at the next
# start, at which the disk is empty again.
$pagingFile = @'
using System;
using System.Runtime.InteropServices;
public static class PagingFile {
    [StructLayout(LayoutKind.Sequential)]
    struct UnicodeString { public ushort Length; public ushort MaximumLength; public IntPtr Buffer; }
    [DllImport("ntdll.dll")]
    static extern int RtlAdjustPrivilege(int privilege, bool enable, bool thread, out bool before);
    [DllImport("ntdll.dll")]
    static extern int NtCreatePagingFile(ref UnicodeString name, ref long least, ref long most, uint priority);
    const int SeCreatePagefilePrivilege = 15;
    public static void Create(string path, long bytes) {
        bool before;
        int status = RtlAdjustPrivilege(SeCreatePagefilePrivilege, true, false, out before);
        if (status != 0) throw new Exception("the right to create page files is missing: 0x" + status.ToString("X"));
        IntPtr buffer = Marshal.StringToHGlobalUni(path);
        UnicodeString name = new UnicodeString();
        name.Length = (ushort)(path.Length * 2);
        name.MaximumLength = (ushort)(path.Length * 2 + 2);
        name.Buffer = buffer;
        status = NtCreatePagingFile(ref name, ref bytes, ref bytes, 0);
        Marshal.FreeHGlobal(buffer);
        if (status != 0) throw new Exception("the page file " + path + " cannot be created: 0x" + status.ToString("X"));
    }
}
'@

try {
    $disks = @(Get-Disk | Where-Object { $_.SerialNumber -and $_.SerialNumber.Trim() -eq $serial })
    if ($disks.Count -ne 1) { throw "there are $($disks.Count) disks with the serial number '$serial', and not one" }
    $disk = $disks[0]
    if ($disk.PartitionStyle -ne 'RAW') { throw "disk $($disk.Number) is not empty" }
    if ($disk.IsOffline) { Set-Disk -Number $disk.Number -IsOffline $false }
    if ($disk.IsReadOnly) { Set-Disk -Number $disk.Number -IsReadOnly $false }
    Initialize-Disk -Number $disk.Number -PartitionStyle GPT | Out-Null
    $partition = New-Partition -DiskNumber $disk.Number -UseMaximumSize -DriveLetter $DriveLetter
    $volume = Format-Volume -Partition $partition -FileSystem NTFS -NewFileSystemLabel 'Scratch' -Confirm:$false
    $temp = "${DriveLetter}:\Temp"
    New-Item -ItemType Directory -Path $temp | Out-Null
    # Users may create files there, and read and change only their own files.
    & icacls.exe $temp /grant '*S-1-5-32-545:(CI)(S,WD,AD,X)' | Out-Null
    foreach ($name in 'TEMP', 'TMP') { [Environment]::SetEnvironmentVariable($name, $temp, 'Machine') }
    $bytes = [long] [math]::Floor($volume.Size * $PageFilePercent / 100 / 1MB) * 1MB
    if ($bytes -gt 0) {
        Add-Type -TypeDefinition $pagingFile
        [PagingFile]::Create("\??\${DriveLetter}:\pagefile.sys", $bytes)
    }
    Write-Outcome 'Information' "disk $($disk.Number) has a page file of $($bytes / 1MB) MiB, and $temp"
} catch {
    Write-Outcome 'Error' "$($_.Exception.Message): page file and temporary files stay where they are"
    exit 1
}
